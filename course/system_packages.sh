#!/bin/sh
# Install what packages.txt lists and this machine lacks, as root or with passwordless sudo, having
# said so. With SYSTEM_PACKAGES=no, or without the right to, say what is missing and go on: FFCV,
# disk offload, the slow link, tracing from the kernel and the tests of Slurm need it.
missing=""
for package in $(grep -v '^#' packages.txt); do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -z "$missing" ] && exit 0
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo -n"
if [ "$SYSTEM_PACKAGES" = no ]; then
  echo "*** These system packages are missing, and SYSTEM_PACKAGES=no:$missing"
elif command -v apt-get >/dev/null && { [ -z "$sudo" ] || sudo -n true 2>/dev/null; }; then
  echo "=== Now apt-get installs system packages:$missing"
  echo "=== (Ctrl-C, and SYSTEM_PACKAGES=no added to the command, goes on without them.)"
  export DEBIAN_FRONTEND=noninteractive
  $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null && exit 0
  echo "*** These system packages are missing and could not be installed:$missing"
else
  echo "*** These system packages are missing and may not be installed from here:$missing"
fi
echo "*** With the right to install, run:   sudo apt install$missing"
echo "*** Going on without them: FFCV will not build, and what needs it says BLOCKED."
