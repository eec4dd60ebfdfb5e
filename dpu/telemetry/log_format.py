"""Lines of the service's log, with the request that they belong to."""

from __future__ import annotations

import json
import logging
import time

from meshfusion.dpu.api.request_ids import current_request_id


class TextFormatter(logging.Formatter):
    """One line for people; ``[request id]`` stands behind the level where there is one."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s%(request)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        request_id = current_request_id.get()
        record.request = f" [{request_id}]" if request_id else ""
        return super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line, whatever the message holds; ``request_id`` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        body = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            body["request_id"] = request_id
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body)
