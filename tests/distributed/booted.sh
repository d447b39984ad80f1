# Boots systemd as process 1 of its own namespaces, to run one unit with all its restrictions. See test_services.py.
set -e
if [ "$1" != inside ]; then
    echo $$ > "$CGROUP/cgroup.procs"
    exec unshare --cgroup --mount --pid --fork --uts --ipc --kill-child --mount-proc bash "$0" inside
fi
mount --make-rprivate /
for given in "$PACKAGES" "$PYTHON_PREFIX" "$SOURCE"; do             # before their places are covered
    mkdir "$FOLDER/$((++n))"
    mount --bind "$given" "$FOLDER/$n"
done
mkdir -p "$FOLDER"/dev/{pts,shm,mqueue,hugepages}                  # systemd writes into /dev
for device in null zero full random urandom tty ptmx; do
    touch "$FOLDER/dev/$device"
    mount --bind /dev/$device "$FOLDER/dev/$device"
done
mount --rbind "$FOLDER/dev" /dev
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
for place in /run /opt /srv /var/lib /var/cache; do mount -t tmpfs -o mode=755 tmpfs $place; done
mkdir -p /opt/packages /opt/python /opt/source /opt/quasiglobal/bin /srv/images
mount --move "$FOLDER/1" /opt/packages
mount --move "$FOLDER/2" /opt/python
mount --move "$FOLDER/3" /opt/source
cat > /opt/quasiglobal/bin/qg <<END
#!/opt/python/bin/python3
import sys
sys.path[:0] = ["/opt/source", "/opt/packages"]
from quasiglobal.cli import main
main()
END
chmod 755 /opt/quasiglobal/bin/qg

cp /etc/passwd /etc/group /run
echo "quasiglobal:x:$USER_ID:$USER_ID::/var/lib/quasiglobal:/usr/sbin/nologin" >> /run/passwd
echo "quasiglobal:x:$USER_ID:" >> /run/group
mount --bind /run/passwd /etc/passwd
mount --bind /run/group /etc/group
cp -r "$FOLDER/data/." /srv/images
mkdir -m 700 /var/lib/quasiglobal
cp -r "$FOLDER/site" "$FOLDER/experiment.toml" /var/lib/quasiglobal
chown -R "$USER_ID:$USER_ID" /var/lib/quasiglobal

units=/run/systemd/system
mkdir -p $units/quasiglobal-node.service.d
cp "$UNIT" $units/quasiglobal-node.service
cat > $units/quasiglobal-node.service.d/test.conf <<END
[Unit]
DefaultDependencies=no
Wants=
[Service]
RestartSec=1
Environment=LD_LIBRARY_PATH=/opt/python/lib OMP_NUM_THREADS=1
StandardOutput=append:/run/node.log
StandardError=append:/run/node.log
END
printf '[Unit]\nDefaultDependencies=no\nWants=quasiglobal-node.service\n' > $units/test.target
touch "$FOLDER/node.log" /run/node.log
mount --bind "$FOLDER/node.log" /run/node.log
umount --lazy /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
export container=other
exec /lib/systemd/systemd --system --unit=test.target --show-status=no
