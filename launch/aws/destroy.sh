#!/usr/bin/env bash
# Delete all that deploy.sh has made, wait for it, and look whether anything is left.
#
#     destroy.sh                       # asks before, since what lies on /efs goes too
#     destroy.sh --name two-nodes --yes
#     AWS_REGION=eu-west-1 AWS_PROFILE=lab destroy.sh    # as deploy.sh has said in its last line
#
# It says "Left: nothing" only of a stack that it has deleted. Where there is none of this name, it
# looks for nodes that bear it in all regions of the account, and fails.
set -euo pipefail
shopt -s inherit_errexit # a question that could not be asked must not count as "nothing"
fail() { echo "$0: $1" >&2; exit 2; }

name=two-nodes
yes=
while [[ $# -gt 0 ]]; do
  case $1 in
    --name) name=${2:?"a name"}; shift ;;
    --yes) yes=yes ;;
    *) fail "unknown flag $1: there are --name NAME and --yes" ;;
  esac
  shift
done
command -v aws >/dev/null || fail "no aws: pip install 'awscli<1.46', or AWS's own installer"
region=${AWS_REGION:-${AWS_DEFAULT_REGION:-$(aws configure get region || true)}}
[[ -n $region ]] || fail "no region: aws configure, or export AWS_DEFAULT_REGION=us-east-1"
export AWS_DEFAULT_REGION=$region
account=$(aws sts get-caller-identity --query Account --output text) ||
  fail "no credentials: aws configure"
where="$region, account $account"

# What would go on costing money bears the name, so the services themselves can be asked for it.
named="Name=tag:Name,Values=$name"
nodes_in() {
  aws ec2 describe-instances --region "$1" --output text --filters "$named" \
    Name=instance-state-name,Values=pending,running,stopping,stopped,shutting-down \
    --query 'Reservations[].Instances[].InstanceId'
}

stack=$(aws cloudformation describe-stacks --stack-name "$name" --output text \
  --query 'Stacks[0].StackId' 2>&1) || [[ $stack == *"does not exist"* ]] || fail "$stack"
if [[ $stack != arn:* ]]; then
  echo "There is no stack $name in $where. Was it deployed elsewhere, or is it deleted already?" >&2
  regions=$(aws ec2 describe-regions --query 'Regions[].RegionName' --output text)
  found=
  for other in $regions; do
    nodes=$(nodes_in "$other")
    [[ -z $nodes ]] || found+=$(printf '\n  AWS_REGION=%s %s --name %s   # there: %s' \
      "$other" "$0" "$name" "$(tr '\n\t' '  ' <<<"$nodes")")
  done
  if [[ -n $found ]]; then
    echo "Nodes of this name bill elsewhere in this account:$found" >&2
  else
    echo "In the $(wc -w <<<"$regions") regions of account $account no node bears this name." \
      "If you have another account: AWS_PROFILE says which one is asked." >&2
  fi
  exit 1
fi
echo "In $where, all of $name: both nodes, their disks, and what lies on /efs."
if [[ -z $yes ]]; then
  read -r -p "Delete it? Only \"yes\" does: " yes || true
  [[ $yes == yes ]] || { echo "Nothing was deleted."; exit 1; }
fi
aws cloudformation delete-stack --stack-name "$stack"
aws cloudformation wait stack-delete-complete --stack-name "$stack" ||
  fail "CloudFormation could not delete it: aws cloudformation describe-stack-events --stack-name $stack"

left=$(
  nodes_in "$region"
  aws ec2 describe-volumes --output text --query 'Volumes[].VolumeId' --filters "$named"
  aws efs describe-file-systems --output text --query "FileSystems[?Name=='$name'].FileSystemId"
)
left=$(tr '\n\t' '  ' <<<"$left")
[[ -z ${left// /} ]] || fail "left in $where: $left"
echo "Left: nothing in $where."
