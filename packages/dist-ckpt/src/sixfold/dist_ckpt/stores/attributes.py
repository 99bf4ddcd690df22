"""What a folder is besides its files: owner, mode, extended attributes, a mount.

    folder that is there --> attributes.py (this file) --> the folder that takes its place

A save replaces a folder by another. What an administrator has set on the old one (a group that shares it, setgid, an
access list, a project id in an extended attribute) is set on the new one, as far as this process may.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")


def copy_attributes(source: Path, target: Path, *, writable: bool = False) -> None:
    """Give folder ``target`` the owner, group, extended attributes (access lists are such) and mode of ``source``.

    What the system does not let this process set stays as it is: the owner unless it is root, the group unless it
    is a member, attributes of other name spaces than ``user`` and access lists.

    Args:
        writable: with all rights for the owner besides.
    """
    status = source.stat()
    if (status.st_uid, status.st_gid) != (target.stat().st_uid, target.stat().st_gid):
        with suppress(OSError):
            os.chown(target, -1, status.st_gid)
        with suppress(OSError):
            os.chown(target, status.st_uid, -1)
    with suppress(OSError):  # a file system without them
        for name in set(os.listxattr(target)) - set(os.listxattr(source)):
            os.removexattr(target, name)
    with suppress(OSError):
        shutil.copystat(source, target)
    os.utime(target)  # which is newer than its source
    os.chmod(target, stat.S_IMODE(status.st_mode) | (stat.S_IRWXU if writable else 0))


def is_mount_point(folder: Path) -> bool:
    """Whether something is mounted on a folder, also a folder of the same file system (bind mount)."""
    if os.path.ismount(folder):
        return True
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    points = (line.split(" ")[4] for line in lines if line.count(" ") > 4)
    return str(folder) in {re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), point) for point in points}
