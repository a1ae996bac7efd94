"""AWS, pretended by moto: what deploy.sh makes, who can reach it, what destroy.sh leaves: nothing.

The template itself is judged by cfn-lint. None of this was run on AWS.
"""

import base64
import csv
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("moto", reason="needs moto, cfn-lint and awscli: make .venv/all")

from course.lessons import ROOT
from tests.helpers import aws

HERE = ROOT / "launch/aws"
TEMPLATE = (HERE / "two_nodes.yaml").read_text()
PRICES = list(
    csv.DictReader(line for line in open(HERE / "prices.csv") if not line.startswith("#"))
)
IMAGE_NAME = re.search(r"Default: (/aws/service/\S+)", TEMPLATE)[1]
OWNER = "203.0.113.7"
EMPTY = Counter(networks=1, subnets=6, routes=1, groups=1)  # the network that every account has


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[aws.Account]:
    home = tmp_path_factory.mktemp("home")
    (home / ".ssh").mkdir()
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / ".ssh/id_ed25519")]
    subprocess.run(argv, check=True)
    with aws.pretended(home, IMAGE_NAME) as account:
        yield account


@pytest.fixture(autouse=True)
def no_stack_stays(account: aws.Account) -> Iterator[None]:
    """A test that fails must not make the next one fail."""
    yield
    account.stacks.delete_stack(StackName="broken")


def deploy(account: aws.Account, *flags: str, said: str = "") -> subprocess.CompletedProcess:
    return account.call(HERE / "deploy.sh", *flags, said=said)


def destroy(account: aws.Account, *flags: str, said: str = "") -> subprocess.CompletedProcess:
    return account.call(HERE / "destroy.sh", *flags, said=said)


def flaws(account: aws.Account) -> list[str]:
    """What is wrong with what there is, as AWS would have it, not as the template says it."""
    found = []
    nodes = account.instances()
    kept = account.backend_instances()
    if len(nodes) != 2:
        found.append(f"{len(nodes)} nodes")
    if {node.placement.group_name for node in kept} != {*aws.placement_groups}:
        found.append("the nodes are not in one placement group")
    if {*aws.placement_groups.values()} != {"cluster"}:
        found.append("no cluster")
    groups = set()
    for node in nodes:
        groups |= {group["GroupId"] for group in node["SecurityGroups"]}
    found += walls(account, groups)
    if {node.metadata_options.http_tokens for node in kept} != {"required"}:
        found.append("IMDSv1 answers")
    volumes = account.ec2.describe_volumes()["Volumes"]
    if len(volumes) != 2 or not all(volume["Encrypted"] for volume in volumes):
        found.append("a disk is not encrypted")
    for node in nodes:
        if not all(disk["Ebs"]["DeleteOnTermination"] for disk in node["BlockDeviceMappings"]):
            found.append("a disk outlives its node")
    for node in kept:
        if not re.search(r"^shutdown -h \+\$minutes$", start_of(node), re.M):
            found.append("a node that is forgotten runs on")
    found += shared_folder(account, kept)
    return found


def start_of(node: aws.Instance) -> str:
    """The script that the node runs when it first starts."""
    return base64.b64decode(str(node.user_data)).decode()


def walls(account: aws.Account, groups: set[str]) -> list[str]:
    """Who may come in besides the owner, by ssh, and the other node."""
    found = []
    if len(groups) != 1:
        found.append("the nodes are not in one group")
    answer = account.ec2.describe_security_groups(GroupIds=sorted(groups))
    rules = []
    for group in answer["SecurityGroups"]:
        rules += group["IpPermissions"]
    between = False
    for rule in rules:
        ranges = [one["CidrIp"] for one in rule["IpRanges"]]
        ranges += [one["CidrIpv6"] for one in rule["Ipv6Ranges"]]
        if ranges and (ranges != [f"{OWNER}/32"] or (rule["FromPort"], rule["ToPort"]) != (22, 22)):
            found.append(f"{ranges} may come in")
        members = {pair["GroupId"] for pair in rule["UserIdGroupPairs"]}
        between |= members == groups and rule["IpProtocol"] == "-1"
    if not between:
        found.append("the nodes do not hear each other")
    return found


def shared_folder(account: aws.Account, nodes: list[aws.Instance]) -> list[str]:
    found = []
    (files,) = account.efs.describe_file_systems()["FileSystems"]
    if not files["Encrypted"]:
        found.append("the files are not encrypted")
    targets = account.efs.describe_mount_targets(FileSystemId=files["FileSystemId"])["MountTargets"]
    if {target["SubnetId"] for target in targets} != {node.subnet_id for node in nodes}:
        found.append("the files are not in the nodes' subnet")
    for node in nodes:
        if f"{files['FileSystemId']}.efs.{aws.REGION}." not in start_of(node):
            found.append("a node mounts no files")
    return found


def test_the_template_is_clean() -> None:
    assert [str(match) for match in aws.lint(TEMPLATE, regions=[aws.REGION])] == []


@pytest.mark.timeout(600)  # aws is started twenty times
def test_everything_is_made_reachable_by_its_owner_and_gone_again(account: aws.Account) -> None:
    assert +account.holds() == EMPTY
    assert deploy(account, "--from", OWNER, said="no\n").returncode == 1
    assert +account.holds() == EMPTY

    ran = deploy(account, "--from", OWNER, said="yes\n")
    assert ran.returncode == 0, ran.stderr
    cost = "2 x $0.526 = $1.05 per hour, $4.21 until they switch themselves off after 4 h."
    assert cost in ran.stdout
    made = dict(instances=2, volumes=2, interfaces=3, networks=1, subnets=1, gateways=1, routes=2)
    made |= dict(groups=2, keys=1, templates=1, placement=1, files=1, stacks=1)
    assert account.holds() - EMPTY == Counter(made)
    assert flaws(account) == []
    # Three interfaces: the nodes', and the one under which the subnet reaches the files.
    assert {node["InstanceType"] for node in account.instances()} == {"g4dn.xlarge"}
    assert {node["ImageId"] for node in account.instances()} == {aws.IMAGE}
    assert {node.instance_initiated_shutdown_behavior for node in account.backend_instances()} == {
        "stop"
    }
    (answer,) = account.stacks.describe_stacks(StackName="two-nodes")["Stacks"]
    outputs = {one["OutputKey"]: one["OutputValue"] for one in answer["Outputs"]}
    for kind, key in [("Public", "PublicIpAddress"), ("Private", "PrivateIpAddress")]:
        assert {outputs[f"{kind}{node}"] for node in range(2)} == {
            node[key] for node in account.instances()
        }
    for node in range(2):  # what it says to type, with these addresses
        line = (
            rf"  ssh ubuntu@{outputs[f'Public{node}']} .* --nodes 2 --head {outputs['Private0']} "
        )
        assert re.search(line, ran.stdout)

    assert destroy(account, said="\n").returncode == 1
    assert account.holds()["instances"] == 2
    ran = destroy(account, "--yes")
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, "Left: nothing."), ran.stderr
    assert +account.holds() == EMPTY


# Stands in for aws where only deploy.sh is tried: notes what it is asked, and answers something.
AWS = """#!/bin/sh
printf '%s\\n' "$@" >"$NOTES/$2"
case "$2" in
  get-caller-identity) echo 123456789012 ;;
  create-stack) echo arn:of:the:stack ;;
  wait) exit "$FAILS" ;;
  describe-stacks) echo 198.51.100.1 198.51.100.2 10.0.0.5 ;;
  describe-stack-events) echo "Node0  VcpuLimitExceeded" ;;
esac
"""


@pytest.fixture
def noted(account: aws.Account, tmp_path: Path) -> dict[str, str]:
    """Variables under which `aws` only takes notes, and the internet calls us 203.0.113.9."""
    for name, text in [("aws", AWS), ("curl", "#!/bin/sh\necho 203.0.113.9\n")]:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {"PATH": f"{tmp_path}:{account.env['PATH']}", "NOTES": str(tmp_path), "FAILS": "0"}


def test_flags_reach_the_nodes(account: aws.Account, noted: dict[str, str]) -> None:
    flags = ["--type", "g6.12xlarge", "--spot", "--hours", "7", "--zone", "us-east-1b", "--yes"]
    ran = account.call(HERE / "deploy.sh", *flags, **noted)
    assert ran.returncode == 0, ran.stderr
    assert "2 x $4.6016 = $9.20 per hour, $64.42 until" in ran.stdout
    asked = Path(noted["NOTES"], "create-stack").read_text()
    assert "\n--on-failure\nDELETE\n" in asked
    given = dict(re.findall(r"ParameterKey=(\w+),ParameterValue=(.*)", asked))
    assert given.pop("From") == "203.0.113.9/32"
    stack_of(account, TEMPLATE, **given)
    assert flaws(account) == []
    for node in account.instances():
        assert (node["InstanceType"], node["InstanceLifecycle"]) == ("g6.12xlarge", "spot")
        assert node["Placement"]["AvailabilityZone"] == "us-east-1b"
    for node in account.backend_instances():
        assert node.instance_initiated_shutdown_behavior == "terminate"
        assert "minutes=$((60 * 7))" in start_of(node)
    account.stacks.delete_stack(StackName="broken")
    assert +account.holds() == EMPTY


def test_what_is_printed_can_be_typed(account: aws.Account, noted: dict[str, str]) -> None:
    printed = account.call(HERE / "deploy.sh", "--yes", "--zone", "us-east-1a", **noted).stdout
    for name in ("ssh", "scp"):
        program = Path(noted["NOTES"], name)
        program.write_text(
            f'#!/bin/sh\nfor word; do line="$line<$word>"; done; echo {name} "$line"\n'
        )
        program.chmod(0o755)
    lines = [line for line in printed.splitlines() if re.match(r"  +(for|ssh|done|scp)", line)]
    how = {"env": account.env | noted, "capture_output": True, "text": True, "timeout": 60}
    ran = subprocess.run(["bash", "-c", "\n".join(lines)], **how)
    assert ran.stderr == ""
    start = ". /opt/pytorch/bin/activate && /efs/launch/launch_ddp.sh --nodes 2 --head 10.0.0.5"
    ready = "<cloud-init status --wait && mountpoint /efs>"
    typed = [f"scp <-r><{ROOT}/launch><ubuntu@198.51.100.1:/efs/>"]
    for node in ("ubuntu@198.51.100.1", "ubuntu@198.51.100.2"):
        typed.append(f"ssh <-o><StrictHostKeyChecking=accept-new><{node}>{ready}")
        typed.append(f"ssh <{node}><{start} /efs/launch/distributed_hello.py>")
    assert sorted(ran.stdout.splitlines()) == sorted(typed)


def test_a_node_s_first_start(account: aws.Account, tmp_path: Path) -> None:
    """Its script, with /etc and /efs elsewhere, and programs that only take notes."""
    stack_of(account, TEMPLATE)
    script = start_of(account.backend_instances()[0])
    files = account.efs.describe_file_systems()["FileSystems"][0]["FileSystemId"]
    account.stacks.delete_stack(StackName="broken")
    (tmp_path / "etc/cron.d").mkdir(parents=True)
    notes = f"{tmp_path}/notes"
    for name in ("shutdown", "mount", "mountpoint", "chown", "sleep", "mount.nfs4", "apt-get"):
        fails = f'test "$(grep -c ^mount\\  {notes})" -gt 2' if name == "mount" else "true"
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{notes}\n{fails}\n')
        (tmp_path / name).chmod(0o755)
    script = script.replace("/etc/", f"{tmp_path}/etc/").replace(" /efs", f" {tmp_path}/efs")
    env = {"PATH": f"{tmp_path}:{account.env['PATH']}"}
    subprocess.run(["bash", "-c", script], env=env, check=True, timeout=60)
    assert (tmp_path / "etc/cron.d/off-by-itself").read_text() == (
        "@reboot root /usr/sbin/shutdown -h +240\n"
    )
    (line,) = (tmp_path / "etc/fstab").read_text().splitlines()
    assert line.startswith(
        f"{files}.efs.us-east-1.amazonaws.com:/ {tmp_path}/efs nfs4 nfsvers=4.1,"
    )
    assert line.endswith(",noresvport,_netdev,nofail 0 0")
    efs = f"{tmp_path}/efs"
    wanted = ["shutdown -h +240", *[f"mount {efs}", "sleep 5"] * 2, f"mount {efs}"]
    wanted += [f"mountpoint {efs}", f"chown ubuntu: {efs}"]
    assert Path(notes).read_text().splitlines() == wanted


def test_what_cannot_be_made_is_told_with_its_reason(
    account: aws.Account, noted: dict[str, str]
) -> None:
    ran = account.call(
        HERE / "deploy.sh", "--yes", "--zone", "us-east-1a", **noted | {"FAILS": "1"}
    )
    assert ran.returncode == 2
    assert "Node0  VcpuLimitExceeded" in ran.stderr
    assert "ssh" not in ran.stdout.partition("Some minutes")[2]


@pytest.mark.deep
def test_what_is_left_is_named(account: aws.Account) -> None:
    assert TEMPLATE.count("DeletionPolicy: Delete\n") == 1
    stack_of(account, TEMPLATE.replace("DeletionPolicy: Delete\n", "DeletionPolicy: Retain\n"))
    files = account.efs.describe_file_systems()["FileSystems"][0]["FileSystemId"]
    ran = destroy(account, "--name", "broken", "--yes")
    assert (ran.returncode, "Left: nothing." in ran.stdout) == (2, False)
    assert f"left in us-east-1: {files}" in ran.stderr
    account.efs.delete_file_system(FileSystemId=files)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--type", "p5.48xlarge"], "no p5.48xlarge in prices.csv: g4dn.xlarge g4dn.2xlarge"),
        (["--hours", "all"], "--hours all: a whole number"),
        (["--yess"], "--yess is not a flag, or wants a value"),
        (["--yess", "5"], "unknown flag --yess"),
        (["--key", "id_other.pub"], "no ssh key id_other.pub: ssh-keygen"),
        (["--key", str(HERE / "prices.csv")], "is not the public half of an ssh key"),
        ([], "cannot find the address that you have: --from ADDRESS"),
    ],
)
def test_a_wrong_line_is_refused_before_aws_is_asked(
    account: aws.Account, flags: list[str], said: str
) -> None:
    nowhere = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "https_proxy": "http://127.0.0.1:1"}
    ran = account.call(HERE / "deploy.sh", *flags, **nowhere)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert said in ran.stderr


def stack_of(account: aws.Account, template: str, **parameters: str) -> None:
    """What deploy.sh asks for, of another template, and without the seconds that `aws` takes."""
    public = (account.home / ".ssh/id_ed25519.pub").read_text()
    given = {"From": f"{OWNER}/32", "PublicKey": public, "Zone": "us-east-1a"} | parameters
    wanted = [{"ParameterKey": key, "ParameterValue": text} for key, text in given.items()]
    account.stacks.create_stack(StackName="broken", TemplateBody=template, Parameters=wanted)


BREAKS = {
    "ssh from everywhere": ("CidrIp: !Ref From", "CidrIp: 0.0.0.0/0", "['0.0.0.0/0'] may come in"),
    "another port too": ("ToPort: 22", "ToPort: 8888", f"['{OWNER}/32'] may come in"),
    "no traffic between the nodes": (
        "SourceSecurityGroupId: !GetAtt SecurityGroup.GroupId",
        "CidrIp: 10.1.0.0/24",
        "the nodes do not hear each other",
    ),
    "a spread": ("Strategy: cluster", "Strategy: spread", "no cluster"),
    "no placement": (
        "        Placement:\n          GroupName: !Ref PlacementGroup\n",
        "",
        "the nodes are not in one placement group",
    ),
    "old metadata": ("HttpTokens: required", "HttpTokens: optional", "IMDSv1 answers"),
    "plain disks": (
        "    Encrypted: true\n         ",
        "    Encrypted: false\n         ",
        "disk is not",
    ),
    "disks that stay": ("OnTermination: true", "OnTermination: false", "outlives its node"),
    "plain files": (
        "Encrypted: true\n      Through",
        "Encrypted: false\n      Through",
        "files are",
    ),
    "never off": ("            shutdown -h", "            echo shutdown -h", "runs on"),
    "no shared folder": ("${Files}.efs.", "fs-1.efs.", "a node mounts no files"),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_template_is_found_out(account: aws.Account, what: str) -> None:
    old, new, flaw = BREAKS[what]
    assert TEMPLATE.count(old) == 1
    stack_of(account, TEMPLATE.replace(old, new))
    found = flaws(account)
    account.stacks.delete_stack(StackName="broken")
    assert any(flaw in one for one in found), found
    for volume in account.ec2.describe_volumes()["Volumes"]:
        account.ec2.delete_volume(VolumeId=volume["VolumeId"])
    assert +account.holds() == EMPTY


def test_the_owner_s_address_is_one_address_and_has_no_default() -> None:
    parameter = aws.loads(TEMPLATE)["Parameters"]["From"]
    assert "Default" not in parameter
    for good in ["203.0.113.7/32", "1.2.3.4/32", "255.255.255.255/32"]:
        assert re.search(parameter["AllowedPattern"], good)
    for bad in ["0.0.0.0/0", "203.0.113.0/24", "203.0.113.7", "203.0.113.256/32", "::/0", "me/32"]:
        assert not re.search(parameter["AllowedPattern"], bad)


def test_template_and_readme_have_the_types_and_prices_of_the_table() -> None:
    types = aws.loads(TEMPLATE)["Parameters"]["InstanceType"]["AllowedValues"]
    assert types == [row["instance"] for row in PRICES]
    readme = (HERE / "README.md").read_text()
    for row in PRICES:
        hour = 2 * float(row["price"])
        cells = [f"`{row['instance']}`", f"{row['gpus']} {row['gpu']}", row["network"]]
        cells += [f"{hour * hours:.2f}" for hours in (1, 4, 24)]
        assert f"| {' | '.join(cells)} |" in readme
