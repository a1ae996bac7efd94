"""AWS, pretended by moto: what deploy.sh makes, who can reach it, what destroy.sh leaves: nothing.

The template itself is judged by cfn-lint. None of this was run on AWS.
"""

import base64
import csv
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pexpect
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
ACCOUNT = "123456789012"
NOTHING = f"Left: nothing in {aws.REGION}, account {ACCOUNT}."
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
    found += unwatched(account, kept)
    found += shared_folder(account, kept)
    return found


def unwatched(account: aws.Account, nodes: list[aws.Instance]) -> list[str]:
    """Nodes that AWS itself does not end some time after they should have ended themselves."""
    found = []
    for node in nodes:
        hours = int(re.search(r"minutes=\$\(\(60 \* (\d+)\)\)", start_of(node))[1])
        end = "terminate" if node.lifecycle == "spot" else "stop"
        action = f"arn:aws:automate:{aws.REGION}:ec2:{end}"
        ends = []
        for alarm in account.alarms():
            watched = [(one.name, one.value) for one in alarm.dimensions]
            if watched != [("InstanceId", node.id)] or alarm.alarm_actions != [action]:
                continue
            # A running node has a CPU utilization of 0 or more in every hour, a stopped one none.
            assert (alarm.namespace, alarm.metric_name) == ("AWS/EC2", "CPUUtilization")
            assert alarm.comparison_operator == "GreaterThanOrEqualToThreshold"
            assert (alarm.threshold, alarm.treat_missing_data) == (0, "notBreaching")
            ends.append(alarm.evaluation_periods * alarm.period / 3600)
        if ends != [hours + 2]:  # the first and the last hour may be minutes
            found.append(f"a node that hangs is ended after {ends} hours")
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
    made |= dict(groups=2, keys=1, templates=1, placement=1, alarms=2, files=1, stacks=1)
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

    last = ran.stdout.splitlines()[-1]
    assert last == f"  AWS_REGION={aws.REGION} {HERE}/destroy.sh --name two-nodes"
    assert destroy(account, said="\n").returncode == 1
    assert account.holds()["instances"] == 2
    how = {"env": account.env | {"AWS_DEFAULT_REGION": "eu-west-1"}, "timeout": 280}
    ran = subprocess.run(f"{last} --yes", shell=True, capture_output=True, text=True, **how)
    assert (ran.returncode, ran.stdout.splitlines()[-1]) == (0, NOTHING), ran.stderr
    assert +account.holds() == EMPTY


@pytest.fixture
def three_regions(account: aws.Account, tmp_path: Path) -> dict[str, str]:
    """Variables under which an account has three regions: each takes a second to look through."""
    real = shutil.which("aws", path=account.env["PATH"])
    three = "grep -x -e us-east-1 -e eu-west-1 -e us-west-2"
    (tmp_path / "aws").write_text(
        "#!/bin/bash\n"
        f'if [[ $2 == describe-regions ]]; then {real} "$@" | tr "\\t" "\\n" | {three}\n'
        f'else exec {real} "$@"; fi\n'
    )
    (tmp_path / "aws").chmod(0o755)
    return {"PATH": f"{tmp_path}:{account.env['PATH']}"}


def test_in_the_wrong_region_nothing_is_said_to_be_gone(
    account: aws.Account, three_regions: dict[str, str]
) -> None:
    stack_of(account, TEMPLATE)
    wrong = {"AWS_REGION": "eu-west-1"} | three_regions
    ran = account.call(HERE / "destroy.sh", "--name", "broken", "--yes", **wrong)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"no stack broken in eu-west-1, account {ACCOUNT}" in ran.stderr
    nodes = sorted(node["InstanceId"] for node in account.instances())
    (line,) = re.findall(r"^  (AWS_REGION=.*)   # there: (.*)$", ran.stderr, re.M)
    assert line[0] == f"AWS_REGION=us-east-1 {HERE}/destroy.sh --name broken"
    assert sorted(line[1].split()) == nodes
    assert account.holds()["instances"] == 2
    account.stacks.delete_stack(StackName="broken")


def test_by_a_wrong_name_nothing_is_said_to_be_gone(
    account: aws.Account, three_regions: dict[str, str]
) -> None:
    ran = account.call(HERE / "destroy.sh", "--name", "two-node", "--yes", **three_regions)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"no stack two-node in us-east-1, account {ACCOUNT}" in ran.stderr
    assert f"In the 3 regions of account {ACCOUNT} no node bears this name." in ran.stderr


def test_what_an_interrupted_deploy_leaves_is_told(
    account: aws.Account, noted: dict[str, str]
) -> None:
    stub = Path(noted["NOTES"], "aws")
    stub.write_text(stub.read_text().replace('wait) exit "$FAILS"', "wait) exec sleep 100"))
    for number in (signal.SIGINT, signal.SIGHUP):
        (waits := Path(noted["NOTES"], "wait")).unlink(missing_ok=True)
        argv = ["bash", str(HERE / "deploy.sh"), "--yes", "--zone", "us-east-1a", "--name", "my"]
        env = account.env | noted | {"AWS_PROFILE": "my lab"}
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": env}
        deploying = subprocess.Popen(argv, process_group=0, **how)
        stop = time.monotonic() + 60
        while not waits.exists():
            assert time.monotonic() < stop
            time.sleep(0.05)
        os.killpg(deploying.pid, number)  # as Ctrl-C does, or a terminal that closes
        _, said = deploying.communicate(timeout=60)
        assert deploying.returncode == 128 + number
        assert f"in us-east-1, account {ACCOUNT}, my may be being made all the same" in said
        remove = rf"AWS_REGION=us-east-1 AWS_PROFILE=my\ lab {HERE}/destroy.sh --name my"
        assert said.endswith(f"{remove}\n")


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
    assert ran.stdout.endswith(f"  AWS_REGION=us-east-1 {HERE}/destroy.sh --name two-nodes\n")
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


@pytest.mark.parametrize("spot", ["no", "yes"])
def test_a_node_s_first_start(spot: str, account: aws.Account, tmp_path: Path) -> None:
    """Its script, with /etc and /efs elsewhere, and programs that only take notes."""
    stack_of(account, TEMPLATE, Spot=spot)
    script = start_of(account.backend_instances()[0])
    files = account.efs.describe_file_systems()["FileSystems"][0]["FileSystemId"]
    account.stacks.delete_stack(StackName="broken")
    (tmp_path / "etc/cron.d").mkdir(parents=True)
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    (tmp_path / "usr/local/sbin").mkdir(parents=True)
    notes = f"{tmp_path}/notes"
    programs = ["shutdown", "mount", "mountpoint", "chown", "sleep", "mount.nfs4", "apt-get"]
    for name in [*programs, "systemctl"]:
        fails = f'test "$(grep -c ^mount\\  {notes})" -gt 2' if name == "mount" else "true"
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{notes}\n{fails}\n')
        (tmp_path / name).chmod(0o755)
    script = script.replace("/etc/", f"{tmp_path}/etc/").replace(" /efs", f" {tmp_path}/efs")
    script = script.replace("/usr/local/sbin/", f"{tmp_path}/usr/local/sbin/")
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
    watched = ["systemctl enable --now spot-watch"] * (spot == "yes")
    wanted = ["shutdown -h +240", *watched, *[f"mount {efs}", "sleep 5"] * 2, f"mount {efs}"]
    wanted += [f"mountpoint {efs}", f"chown ubuntu: {efs}"]
    assert Path(notes).read_text().splitlines() == wanted
    unit = (tmp_path / "etc/systemd/system/spot-watch.service").read_text()
    assert f"[Service]\nExecStart={tmp_path}/usr/local/sbin/spot-watch\n[Install]\n" in unit
    told_to_end(tmp_path)


# Stands in for curl on a spot node: a page that appears when it is asked for the third time.
CURL = """#!/bin/sh
echo "$@" >>"$NOTES/asked"
case "$*" in
  *--max-time*"token-ttl-seconds: 60 --request PUT http://169.254.169.254/latest/api/token")
    echo TOKEN ;;
  *--max-time*"-token: TOKEN http://169.254.169.254/latest/meta-data/spot/instance-action")
    test "$(grep -c instance-action "$NOTES/asked")" -gt 2 ;;
  *) echo "$@" >>"$NOTES/wrong" ; exit 22 ;;
esac
"""


def told_to_end(folder: Path) -> None:
    """What the watcher does once AWS has said that it takes the node: whom SIGTERM would reach."""
    (folder / "curl").write_text(CURL)
    (folder / "pkill").write_text(
        '#!/bin/sh\necho "$1 $2" >>"$NOTES/signal"; pgrep -f "$3" >"$NOTES/hit"\n'
    )
    (folder / "sleep").write_text("#!/bin/sh\necho sleep >>$NOTES/asked\n")
    for name in ("curl", "pkill", "sleep"):
        (folder / name).chmod(0o755)
    (folder / "bin").mkdir()
    for name in ("bin/torchrun", "train.py"):
        (folder / name).write_text("import time\ntime.sleep(1000)\n")
    lines = [
        [sys.executable, f"{folder}/bin/torchrun", "train.py"],
        ["bash", "-c", 'exec -a "python -m torch.distributed.run train.py" sleep 1000'],
        [sys.executable, "-u", f"{folder}/train.py"],
    ]
    started = [subprocess.Popen(line) for line in lines]
    try:
        time.sleep(0.5)  # bash becomes what it says
        env = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTES": str(folder)}
        subprocess.run([folder / "usr/local/sbin/spot-watch"], env=env, check=True, timeout=60)
        hit = {int(pid) for pid in (folder / "hit").read_text().split()}
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert not (folder / "wrong").exists(), (folder / "wrong").read_text()
    assert (folder / "asked").read_text().splitlines().count("sleep") == 2
    assert (folder / "signal").read_text() == "-TERM -f\n"  # once: a second one would cut it short
    assert [process.pid in hit for process in started] == [True, True, False]


def test_what_trains_overnight_outlives_its_connection(tmp_path: Path) -> None:
    """The README's line, as ssh would have a shell run it; then the terminal is closed."""
    (line,) = re.findall(
        r"`ssh ubuntu@PUBLIC0 '([^']*setsid[^']*)'`", (HERE / "README.md").read_text()
    )
    (tmp_path / "launch").mkdir()
    (tmp_path / "activate").touch()
    stub = tmp_path / "launch/launch_ddp.sh"
    stub.write_text('#!/bin/sh\necho "$$" "$@"\nexec sleep 1000\n')
    stub.chmod(0o755)
    line = line.replace("/opt/pytorch/bin/activate", f"{tmp_path}/activate")
    line = line.replace("/efs/", f"{tmp_path}/")
    # ssh gives such a line no terminal; here it has one, which stays until training has begun.
    line += f"; until [ -s {tmp_path}/node0.log ]; do sleep 0.1; done"
    shell = pexpect.spawn("bash", ["-c", line], timeout=60)
    shell.expect(pexpect.EOF)  # ssh has its prompt back
    shell.close(force=True)
    pid, *flags = (tmp_path / "node0.log").read_text().split()
    os.kill(int(pid), signal.SIGKILL)  # raises if it has ended
    assert flags[:4] == ["--nodes", "2", "--head", "PRIVATE0"]
    assert flags[-2:] == ["--checkpoints", f"{tmp_path}/checkpoints"]


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
    assert (ran.returncode, "Left: nothing" in ran.stdout) == (2, False)
    assert f"left in us-east-1, account {ACCOUNT}: {files}" in ran.stderr
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
    "an alarm for one node only": (
        "Value: !Ref Node1}]\n      Statistic",
        "Value: !Ref Node0}]\n      Statistic",
        "a node that hangs is ended after [] hours",
    ),
    "an alarm before the time": ("Default: 6", "Default: 4", "is ended after [4.0] hours"),
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


RESNET = {"bytes": 4 * 11_689_512, "FLOP per image": 3 * 2 * 1.814e9}  # ResNet-18, 224 x 224
PEAK = {"T4": 65e12, "L4": 121e12}  # dense, float16: NVIDIA's data sheets


def test_what_to_expect_is_what_the_formula_says() -> None:
    readme = (HERE / "README.md").read_text()
    for row in PRICES:
        gpus = 2 * int(row["gpus"])
        seconds = 2 * (gpus - 1) / gpus * RESNET["bytes"] / (float(row["network"]) * 1e9 / 8)
        images = seconds * PEAK[row["gpu"]] / 5 / RESNET["FLOP per image"]
        cells = [f"`{row['instance']}`", f"{gpus} {row['gpu']}", f"{1000 * seconds:.0f}"]
        assert f"| {' | '.join(cells)} | {images:.0f} |" in readme


def test_template_and_readme_have_the_types_and_prices_of_the_table() -> None:
    types = aws.loads(TEMPLATE)["Parameters"]["InstanceType"]["AllowedValues"]
    assert types == [row["instance"] for row in PRICES]
    readme = (HERE / "README.md").read_text()
    for row in PRICES:
        hour = 2 * float(row["price"])
        cells = [f"`{row['instance']}`", f"{row['gpus']} {row['gpu']}", row["network"]]
        cells += [f"{hour * hours:.2f}" for hours in (1, 4, 24)]
        assert f"| {' | '.join(cells)} |" in readme
