"""Who may make networks of their own here: a user who is not root, for tests that need that."""

import os
import shutil
import subprocess

import pytest

# Root needs no user namespace to make a network, so it is not root who tries.
AS_NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
if os.geteuid() != 0:
    AS_NOBODY = []


def allowed() -> bool:
    """Whether the kernel, or the container that we are in, lets users make namespaces."""
    if not (shutil.which("unshare") and shutil.which("setpriv")):
        return False
    trial = [*AS_NOBODY, "unshare", "--user", "--map-root-user", "--net", "--pid", "--fork", "true"]
    return subprocess.run(trial, capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not allowed(), reason="needs Linux, util-linux, and user namespaces that users may make"
)
