"""The form of SHA256SUMS.sig: an armored OpenSSH signature (PROTOCOL.sshsig) for the namespace of archives."""

import base64
import binascii
import re

NAMESPACE = "mlbench-archive"
MAX_SIGNATURE_BYTES = 16 << 10

_ARMOR = re.compile(rb"-----BEGIN SSH SIGNATURE-----\n([A-Za-z0-9+/=\n]+)\n-----END SSH SIGNATURE-----\n")
_MAGIC = b"SSHSIG\0\0\0\1"


def find_signature_problem(data: bytes) -> str | None:
    """Why `data` is no OpenSSH signature for an archive, or None. Whether it is right, only `check_origin` can say."""
    match = _ARMOR.fullmatch(data)
    try:
        blob = base64.b64decode(match[1].replace(b"\n", b""), validate=True) if match else b""
    except binascii.Error:
        blob = b""
    if not blob.startswith(_MAGIC):
        return "it is no OpenSSH signature"
    if len(NAMESPACE).to_bytes(4, "big") + NAMESPACE.encode() not in blob:
        return f"it is a signature for another purpose than {NAMESPACE}"
    return None
