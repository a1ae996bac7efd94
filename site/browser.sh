#!/bin/sh
# The Chromium of the site's tests: the one that is here, else Debian's, as root or with passwordless sudo.
for name in chromium chromium-browser google-chrome google-chrome-stable; do
  command -v "$name" >/dev/null && exit 0
done
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo -n"
if [ "$SYSTEM_PACKAGES" != no ] && command -v apt-get >/dev/null; then
  echo "=== Now apt-get installs Chromium, which the tests of the site drive"
  export DEBIAN_FRONTEND=noninteractive
  $sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends chromium >/dev/null && exit 0
fi
echo "*** There is no Chromium here, and none could be installed: the pages are not tried in a browser."
echo "*** With the right to install, run:   sudo apt install chromium"
exit 1
