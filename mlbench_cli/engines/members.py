"""Which members of a foreign tar archive may be unpacked."""

import tarfile


def keep_harmless(member: tarfile.TarInfo, folder: str) -> tarfile.TarInfo | None:
    """The member as it may be written below `folder`; None for devices and the like, and for paths that lead out."""
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None
    try:
        return tarfile.data_filter(member, folder)
    except tarfile.FilterError:
        return None
