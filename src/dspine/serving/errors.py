"""Errors in the shape that OpenAI's clients read: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from dspine.errors import UserError
from dspine.serving.protocol import FIELD_NAMES

log = logging.getLogger("dspine.serving")

LONGEST_MESSAGE = 500  # characters: a message may quote what the client sent


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    error: ErrorBody


class ApiError(HTTPException):
    """A refusal or failure with its HTTP status. `code` is for programs, `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code, self.param = code, param

    def reply(self) -> ErrorReply:
        return error_reply(self.status_code, str(self.detail), self.code, self.param)


def error_reply(status: int, message: str, code: str | None = None, param: str | None = None) -> ErrorReply:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    # Clients send lone surrogates too, which no JSON reply can hold.
    text = message.encode("utf-8", "replace").decode("utf-8")
    return ErrorReply(error=ErrorBody(message=text[:LONGEST_MESSAGE], type=kind, param=param, code=code))


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.reply().model_dump(), error.status_code, error.headers)


def unexpected(error: Exception) -> ApiError:
    """What clients are told about a failure of ours; the log has the rest."""
    log.error("a request failed", exc_info=error)
    return ApiError(500, "the server failed at this request; its log says why", code="internal_error")


def invalid_request(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, and where."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON ({first['ctx']['error']} at character {place[0]})", code="invalid_json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"this server does not know the parameter {place[-1]!r}", code="unknown_parameter", param=place[-1])
    param = ".".join(part for part in place if part.isdecimal() or part in FIELD_NAMES) or None
    return ApiError(400, f"{param or 'the body'}: {first['msg']}", code="invalid_value", param=param)


def install_error_handlers(app: FastAPI) -> None:
    """Let every error leave the app in OpenAI's shape."""

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):
            detail = str(error.detail)
            message = f"{HTTPStatus(error.status_code).phrase}: {detail}" if detail else ""
            error = ApiError(error.status_code, message, headers=error.headers)
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(invalid_request(error))

    @app.exception_handler(UserError)
    async def user(_: Request, error: UserError) -> JSONResponse:
        return error_response(ApiError(400, str(error), code="invalid_value"))

    @app.exception_handler(Exception)
    async def failure(_: Request, error: Exception) -> JSONResponse:
        return error_response(unexpected(error))
