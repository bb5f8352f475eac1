"""The format of signatures: armored OpenSSH signatures (PROTOCOL.sshsig) for the namespace of archives or receipts."""

import base64
import binascii
import re

NAMESPACE = "mlbench-archive"
RECEIPT_NAMESPACE = "mlbench-receipt"
MAX_SIGNATURE_BYTES = 16 << 10

_ARMOR = re.compile(rb"-----BEGIN SSH SIGNATURE-----\n([A-Za-z0-9+/=\n]+)\n-----END SSH SIGNATURE-----\n")
_MAGIC = b"SSHSIG\0\0\0\1"


def find_signature_problem(data: bytes, namespace: str = NAMESPACE) -> str | None:
    """Why `data` is not an OpenSSH signature for `namespace`, or None. Only `check_origin` checks its validity."""
    match = _ARMOR.fullmatch(data)
    try:
        blob = base64.b64decode(match[1].replace(b"\n", b""), validate=True) if match else b""
    except binascii.Error:
        blob = b""
    if not blob.startswith(_MAGIC):
        return "it is not an OpenSSH signature"
    if len(namespace).to_bytes(4, "big") + namespace.encode() not in blob:
        return f"it is a signature for another namespace than {namespace}"
    return None
