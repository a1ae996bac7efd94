#!/usr/bin/env bash
# Delete all that deploy.sh has made, wait for it, and look whether anything is left.
#
#     destroy.sh                       # asks before, since what lies on /efs goes too
#     destroy.sh --name two-nodes --yes
#
# It may be run again at any time, and says "Left: nothing" if that is so.
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

stack=$(aws cloudformation describe-stacks --stack-name "$name" --output text \
  --query 'Stacks[0].StackId' 2>&1) || [[ $stack == *"does not exist"* ]] || fail "$stack"
if [[ $stack == arn:* ]]; then
  echo "In $region, all of $name: both nodes, their disks, and what lies on /efs."
  if [[ -z $yes ]]; then
    read -r -p "Delete it? Only \"yes\" does: " yes || true
    [[ $yes == yes ]] || { echo "Nothing was deleted."; exit 1; }
  fi
  aws cloudformation delete-stack --stack-name "$stack"
  aws cloudformation wait stack-delete-complete --stack-name "$stack" ||
    fail "CloudFormation could not delete it: aws cloudformation describe-stack-events --stack-name $stack"
fi

# What would go on costing money, asked of the services themselves. All of it bears the name.
named="Name=tag:Name,Values=$name"
left=$(
  aws ec2 describe-instances --output text --query 'Reservations[].Instances[].InstanceId' --filters \
    "$named" Name=instance-state-name,Values=pending,running,stopping,stopped,shutting-down
  aws ec2 describe-volumes --output text --query 'Volumes[].VolumeId' --filters "$named"
  aws efs describe-file-systems --output text --query "FileSystems[?Name=='$name'].FileSystemId"
)
left=$(tr '\n\t' '  ' <<<"$left")
[[ -z ${left// /} ]] || fail "left in $region: $left"
echo "Left: nothing."
