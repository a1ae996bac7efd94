#!/usr/bin/env bash
# Two GPU nodes on AWS (two_nodes.yaml). Says what they cost, and asks, before anything costs money.
#
#     deploy.sh                             # two g4dn.xlarge, off by themselves after 4 hours
#     deploy.sh --type g6.12xlarge --spot   # 4 L4 per node, cheaper, may be taken away
#
#     --from 203.0.113.7     the only address that may reach the nodes; else the one you have now
#     --key ~/.ssh/id.pub    the ssh key that opens them; else ~/.ssh/id_ed25519.pub or id_rsa.pub
#     --hours 4              so long after a start a node switches itself off
#     --zone us-east-1a      else the first zone that offers the type
#     --name two-nodes       what all of it is called
#     --image NAME           another image: the name of an SSM parameter that holds its number
#     --yes                  do not ask
#
# It needs the command aws, with credentials and a region (aws configure). destroy.sh undoes it all.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
fail() { echo "$0: $1" >&2; exit 2; }

type=g4dn.xlarge
from=
key=
hours=4
zone=
name=two-nodes
more=()
spot=no
yes=
while [[ $# -gt 0 ]]; do
  case $1 in
    --spot) spot=yes; shift; continue ;;
    --yes) yes=yes; shift; continue ;;
    --help) sed -n '2,/^set/{/^set/!s/^# \{0,1\}//p}' "$0"; exit ;;
  esac
  [[ $# -gt 1 ]] || fail "$1 is not a flag, or wants a value; --help lists them"
  case $1 in
    --type) type=$2 ;;
    --from) from=$2 ;;
    --key) key=$2 ;;
    --hours) hours=$2 ;;
    --zone) zone=$2 ;;
    --name) name=$2 ;;
    --image) more+=("ParameterKey=Image,ParameterValue=$2") ;;
    *) fail "unknown flag $1; --help lists them" ;;
  esac
  shift 2
done

IFS=, read -r _ gpus gpu network price < <(grep "^$type," "$here/prices.csv") ||
  fail "no $type in prices.csv: $(grep -o '^g[^,]*' "$here/prices.csv" | paste -sd ' ')"
[[ $hours =~ ^[0-9]+$ ]] || fail "--hours $hours: a whole number"

command -v aws >/dev/null || fail "no aws: pip install 'awscli<1.46', or AWS's own installer"
region=${AWS_REGION:-${AWS_DEFAULT_REGION:-$(aws configure get region || true)}}
[[ -n $region ]] || fail "no region: aws configure, or export AWS_DEFAULT_REGION=us-east-1"
export AWS_DEFAULT_REGION=$region

for try in ~/.ssh/id_ed25519.pub ~/.ssh/id_rsa.pub; do
  [[ -n $key || ! -e $try ]] || key=$try
done
[[ -r $key ]] || fail "no ssh key ${key:-of yours}: ssh-keygen -t ed25519, or --key FILE.pub"
read -r kind body _ <"$key" || true
[[ $kind == ssh-ed25519 || $kind == ssh-rsa ]] || fail "$key is not the public half of an ssh key"
[[ -n $from ]] || from=$(curl -4fsS --max-time 10 https://checkip.amazonaws.com) ||
  fail "cannot find the address that you have: --from ADDRESS"
account=$(aws sts get-caller-identity --query Account --output text) || fail "no credentials: aws configure"
if [[ -z $zone ]]; then
  zone=$(aws ec2 describe-instance-type-offerings --location-type availability-zone \
    --filters "Name=instance-type,Values=$type" \
    --query 'sort(InstanceTypeOfferings[].Location)[0]' --output text)
  [[ $zone != None ]] || fail "no zone of $region offers $type"
fi

cat <<END
Two $type ($gpus $gpu and $network Gb/s each) in $zone, account $account, open to ${from%/32} by ssh.
$(awk -v p="$price" -v h="$hours" 'BEGIN {
  printf "  2 x $%s = $%.2f per hour, $%.2f until they switch themselves off after %d h.", p, 2 * p, 2 * p * h, h }')
  $(sed -n '1s/^# //p' "$here/prices.csv")
  Other regions cost more. Disks, files, public addresses and traffic cost besides, disks and files
  until destroy.sh.$([[ $spot == no ]] || echo " Spot costs less than this, as demand goes.")
END
if [[ -z $yes ]]; then
  read -r -p "Make them? Only \"yes\" does: " yes || true
  [[ $yes == yes ]] || { echo "Nothing was made."; exit 1; }
fi

# How to take all of it away again, in the region and the account in which it is made now.
remove="$here/destroy.sh --name $name"
[[ -z ${AWS_PROFILE:-} ]] || remove="AWS_PROFILE=$(printf %q "$AWS_PROFILE") $remove"
remove="AWS_REGION=$region $remove"
interrupted() {
  echo "Not waited for: in $region, account $account, $name may be being made all the same, and will" \
    "cost money. Take it away, now or later: $remove" >&2
  exit "$1"
}
trap 'interrupted 129' HUP
trap 'interrupted 130' INT
trap 'interrupted 143' TERM

# If a part cannot be made, CloudFormation takes away the rest.
stack=$(aws cloudformation create-stack --stack-name "$name" --on-failure DELETE \
  --template-body "file://$here/two_nodes.yaml" --query StackId --output text --parameters \
  "ParameterKey=InstanceType,ParameterValue=$type" "ParameterKey=From,ParameterValue=${from%/32}/32" \
  "ParameterKey=PublicKey,ParameterValue=$kind $body" "ParameterKey=Zone,ParameterValue=$zone" \
  "ParameterKey=Spot,ParameterValue=$spot" "ParameterKey=Hours,ParameterValue=$hours" \
  "ParameterKey=AlarmHours,ParameterValue=$((hours + 2))" "${more[@]}")
echo "Some minutes ..."
if ! aws cloudformation wait stack-create-complete --stack-name "$stack"; then
  aws cloudformation describe-stack-events --stack-name "$stack" --output text --query \
    'StackEvents[?ResourceStatus==`CREATE_FAILED`].[LogicalResourceId, ResourceStatusReason]' >&2
  fail "it could not be made; the reason is above. Has nothing stayed? $remove"
fi

read -r public0 public1 head < <(aws cloudformation describe-stacks --stack-name "$stack" --output text \
  --query 'Stacks[0].Outputs[] | [[?OutputKey==`Public0`], [?OutputKey==`Public1`], [?OutputKey==`Private0`]][].OutputValue')
launch=". /opt/pytorch/bin/activate && /efs/launch/launch_ddp.sh --nodes 2 --head $head"
cat <<END

They run. Wait until both have the shared folder, and copy launch/ there:
  for node in $public0 $public1; do
    ssh -o StrictHostKeyChecking=accept-new ubuntu@\$node 'cloud-init status --wait && mountpoint /efs'
  done
  scp -r $(dirname "$here") ubuntu@$public0:/efs/
Start a script of it on both:
  ssh ubuntu@$public0 '$launch /efs/launch/distributed_hello.py' &
  ssh ubuntu@$public1 '$launch /efs/launch/distributed_hello.py'; wait
When you are done:
  $remove
END
