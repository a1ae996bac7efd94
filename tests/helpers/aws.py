"""A pretended AWS on this machine: moto, taught what its CloudFormation lacks. Needs moto.

Taught here: placement groups, key pairs, alarms, instances made from a launch template, and that
gateways and routes go with their stack. The rest (stacks, rules, volumes, EFS) is moto's own.
"""

import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

os.environ.setdefault("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")  # 1300 images, which take seconds

import boto3
from cfnlint.api import lint
from cfnlint.decode.cfn_yaml import loads
from moto.cloudwatch.models import cloudwatch_backends
from moto.core import DEFAULT_ACCOUNT_ID
from moto.core.common_models import CloudFormationModel
from moto.ec2.models import ec2_backends
from moto.ec2.models.instances import Instance
from moto.ec2.models.internet_gateways import InternetGateway
from moto.ec2.models.route_tables import Route, RouteTable
from moto.ec2.models.subnets import SubnetRouteTableAssociation
from moto.ec2.models.vpn_gateway import VPCGatewayAttachment
from moto.server import ThreadedMotoServer
from moto.ssm.models import Parameter, ssm_backends

__all__ = ["Account", "Instance", "lint", "loads", "pretended"]
REGION = "us-east-1"
IMAGE = "ami-0123456789abcdef0"
placement_groups: dict[str, str] = {}  # name: strategy


class PlacementGroup(CloudFormationModel):
    """As AWS::EC2::PlacementGroup: a name, and a strategy."""

    def __init__(self, name: str):
        self.physical_resource_id = name

    @staticmethod
    def cloudformation_name_type() -> str:
        return "GroupName"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::PlacementGroup"

    @classmethod
    def create_from_cloudformation_json(cls, resource_name, cloudformation_json, *_, **__):
        placement_groups[resource_name] = cloudformation_json["Properties"]["Strategy"]
        return cls(resource_name)

    def delete(self, account_id: str, region_name: str) -> None:
        del placement_groups[self.physical_resource_id]


class Key(CloudFormationModel):
    """As AWS::EC2::KeyPair with a public key that the user brings."""

    def __init__(self, name: str):
        self.physical_resource_id = name

    @staticmethod
    def cloudformation_name_type() -> str:
        return "KeyName"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::KeyPair"

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name, cloudformation_json, account_id, region_name, **_
    ):
        public = cloudformation_json["Properties"]["PublicKeyMaterial"].encode()
        ec2_backends[account_id][region_name].import_key_pair(resource_name, public, {})
        return cls(resource_name)

    def delete(self, account_id: str, region_name: str) -> None:
        ec2_backends[account_id][region_name].delete_key_pair(self.physical_resource_id)


class Alarm(CloudFormationModel):
    """As AWS::CloudWatch::Alarm, put as the API would put it."""

    def __init__(self, name: str):
        self.physical_resource_id = name

    @staticmethod
    def cloudformation_name_type() -> str:
        return "AlarmName"

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::CloudWatch::Alarm"

    @classmethod
    def create_from_cloudformation_json(
        cls, resource_name, cloudformation_json, account_id, region_name, **_
    ):
        wanted = cloudformation_json["Properties"]
        cloudwatch_backends[account_id][region_name].put_metric_alarm(
            name=resource_name,
            namespace=wanted["Namespace"],
            metric_name=wanted["MetricName"],
            comparison_operator=wanted["ComparisonOperator"],
            evaluation_periods=int(wanted["EvaluationPeriods"]),
            period=int(wanted["Period"]),
            threshold=float(wanted["Threshold"]),
            statistic=wanted["Statistic"],
            description=wanted["AlarmDescription"],
            dimensions=wanted["Dimensions"],
            alarm_actions=wanted["AlarmActions"],
            treat_missing_data=wanted["TreatMissingData"],
        )
        return cls(resource_name)

    def delete(self, account_id: str, region_name: str) -> None:
        cloudwatch_backends[account_id][region_name].delete_alarms([self.physical_resource_id])


def instance_of_template(
    cls, resource_name, cloudformation_json, account_id, region_name, **_
) -> Instance:
    """As AWS::EC2::Instance with LaunchTemplate, SubnetId and Tags, which is all that we use."""
    wanted = cloudformation_json["Properties"]
    backend = ec2_backends[account_id][region_name]
    number = wanted["LaunchTemplate"]["LaunchTemplateId"]
    data = backend.get_launch_template(number).latest_version().data
    group = data.get("Placement", {}).get("GroupName")
    assert group is None or group in placement_groups, f"no placement group {group}"
    tags = {}
    for spec in data.get("TagSpecifications", []):
        tags[spec["ResourceType"]] = {tag["Key"]: tag["Value"] for tag in spec["Tags"]}
    reservation = backend.run_instances(
        data["ImageId"],
        1,
        data["UserData"],
        [],
        instance_type=data["InstanceType"],
        is_instance_type_default=False,
        key_name=data["KeyName"],
        subnet_id=wanted["SubnetId"],
        associate_public_ip=True,  # moto forgets that the subnet says so
        security_group_ids=list(data["SecurityGroupIds"]),
        block_device_mappings=data["BlockDeviceMappings"],
        instance_initiated_shutdown_behavior=data.get("InstanceInitiatedShutdownBehavior"),
        instance_market_options=data.get("InstanceMarketOptions"),
        metadata_options=data.get("MetadataOptions", {}),
        tags=tags,
    )
    (instance,) = reservation.instances
    instance.placement.group_name = group or ""
    for interface in instance.nics.values():
        interface.delete_on_termination = True  # as AWS does with an instance's first one
    instance.add_tags({tag["Key"]: tag["Value"] for tag in wanted["Tags"]})
    return instance


def delete_gateway(gateway, account_id: str, region_name: str) -> None:
    ec2_backends[account_id][region_name].delete_internet_gateway(gateway.id)


def detach_gateway(attachment, account_id: str, region_name: str) -> None:
    backend = ec2_backends[account_id][region_name]
    backend.detach_internet_gateway(attachment.gateway_id, attachment.vpc_id)


def delete_routes(routes, account_id: str, region_name: str) -> None:
    ec2_backends[account_id][region_name].delete_route_table(routes.id)


def delete_route(route, account_id: str, region_name: str) -> None:
    """It goes with its table, which may be gone by now."""


def loosen_routes(association, account_id: str, region_name: str) -> None:
    table = ec2_backends[account_id][region_name].route_tables.get(association.route_table_id)
    if table is None:
        return
    for number, subnet in [*table._associations.items()]:
        if subnet == association.subnet_id:
            del table._associations[number]


TAUGHT = [
    (InternetGateway, delete_gateway),
    (VPCGatewayAttachment, detach_gateway),
    (Route, delete_route),
    (RouteTable, delete_routes),
    (SubnetRouteTableAssociation, loosen_routes),
]


class Account:
    """An account that `aws` and boto3 reach on this machine: what it holds, and a command in it."""

    def __init__(self, address: str, home: Path):
        self.home = home
        bin_folder = Path(sys.executable).parent
        self.env = {
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "HOME": str(home),
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "pretended",
            "AWS_SECRET_ACCESS_KEY": "pretended",
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        known = {"aws_access_key_id": "pretended", "aws_secret_access_key": "pretended"}
        session = boto3.Session(region_name=REGION, **known)
        self.ec2 = session.client("ec2", endpoint_url=address)
        self.efs = session.client("efs", endpoint_url=address)
        self.stacks = session.client("cloudformation", endpoint_url=address)

    def call(
        self, script: Path, *arguments: str, said: str = "", **variables: str
    ) -> subprocess.CompletedProcess:
        """Run a script in this account, with what the user types when asked."""
        how = {"env": self.env | variables, "input": said, "capture_output": True, "text": True}
        return subprocess.run(["bash", str(script), *arguments], **how, timeout=280)

    def instances(self) -> list[dict]:
        alive = {"Name": "instance-state-name", "Values": ["pending", "running", "stopped"]}
        reservations = self.ec2.describe_instances(Filters=[alive])["Reservations"]
        return [reservation["Instances"][0] for reservation in reservations]

    def backend_instances(self) -> list[Instance]:
        """The same in moto's own memory: it knows what its API does not say, such as groups."""
        backend = ec2_backends[DEFAULT_ACCOUNT_ID][REGION]
        return [backend.get_instance(one["InstanceId"]) for one in self.instances()]

    def alarms(self) -> list:
        """Those of CloudWatch, in moto's own memory."""
        return [*cloudwatch_backends[DEFAULT_ACCOUNT_ID][REGION].alarms.values()]

    def holds(self) -> Counter:
        """How many of each kind of thing there are."""
        ec2 = self.ec2
        stacks = self.stacks.list_stacks()["StackSummaries"]
        return Counter(
            instances=len(self.instances()),
            volumes=len(ec2.describe_volumes()["Volumes"]),
            networks=len(ec2.describe_vpcs()["Vpcs"]),
            subnets=len(ec2.describe_subnets()["Subnets"]),
            gateways=len(ec2.describe_internet_gateways()["InternetGateways"]),
            routes=len(ec2.describe_route_tables()["RouteTables"]),
            groups=len(ec2.describe_security_groups()["SecurityGroups"]),
            interfaces=len(ec2.describe_network_interfaces()["NetworkInterfaces"]),
            addresses=len(ec2.describe_addresses()["Addresses"]),
            keys=len(ec2.describe_key_pairs()["KeyPairs"]),
            templates=len(ec2.describe_launch_templates()["LaunchTemplates"]),
            placement=len(placement_groups),
            alarms=len(self.alarms()),
            files=len(self.efs.describe_file_systems()["FileSystems"]),
            stacks=sum(stack["StackStatus"] != "DELETE_COMPLETE" for stack in stacks),
        )


def name_an_image(parameter: str) -> None:
    """Let the name stand for an image. The API lets nobody write names under /aws."""
    known = ssm_backends[DEFAULT_ACCOUNT_ID][REGION]._parameters
    image = {"name": parameter, "value": IMAGE, "parameter_type": "String", "version": 1}
    image |= dict.fromkeys(["description", "allowed_pattern", "keyid", "last_modified_date"])
    known[parameter].append(Parameter(DEFAULT_ACCOUNT_ID, data_type="aws:ec2:image", **image))


@contextmanager
def pretended(home: Path, image: str) -> Iterator[Account]:
    """Serve an account that is empty but knows an image, in a thread of this process."""
    name_an_image(image)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with ExitStack() as taught:
        taught.callback(server.stop)
        made = classmethod(instance_of_template)
        taught.enter_context(patch.object(Instance, "create_from_cloudformation_json", made))
        for kind, delete in TAUGHT:
            taught.enter_context(patch.object(kind, "delete", delete, create=True))
        yield Account("http://{}:{}".format(*server.get_host_and_port()), home)
