"""Answers in the forms of AWS' protocols."""

import json
from dataclasses import dataclass, field
from typing import Any
from xml.sax.saxutils import escape


class ApiError(Exception):
    """An error that AWS would answer with."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: list[tuple[str, str]] = field(default_factory=list)


def json_answer(document: Any, status: int = 200) -> Answer:
    return Answer(status, json.dumps(document).encode(), [("Content-Type", "application/json")])


def xml_answer(element: str, space: str, body: str = "") -> Answer:
    """EC2 puts an answer's fields at the top; the others into a result."""
    if not space.startswith("http://ec2"):
        result = element.replace("Response", "Result")
        body = f"<{result}>{body}</{result}><ResponseMetadata><RequestId>double</RequestId></ResponseMetadata>"
    return Answer(200, f'<{element} xmlns="{space}">{body}</{element}>'.encode(), [("Content-Type", "text/xml")])


def error_answer(service: str, code: str, message: str, status: int) -> Answer:
    if service == "eks":
        headers = [("Content-Type", "application/json"), ("x-amzn-ErrorType", code)]
        return Answer(status, json.dumps({"message": message}).encode(), headers)
    if service in ("servicequotas", "pricing", "ecr"):
        return Answer(
            status, json.dumps({"__type": code, "message": message}).encode(), [("Content-Type", "application/json")]
        )
    said = f"<Code>{escape(code)}</Code><Message>{escape(message)}</Message>"
    text = f"<ErrorResponse><Error>{said}</Error><RequestId>double</RequestId></ErrorResponse>"
    if service == "ec2":
        text = f"<Response><Errors><Error>{said}</Error></Errors><RequestID>double</RequestID></Response>"
    return Answer(status, text.encode(), [("Content-Type", "text/xml")])
