"""Tasks for tests, registered in BrowserGym's interpreter by DART_BROWSERGYM_PACKAGES; never imported here."""

from __future__ import annotations

import base64
import io
from typing import Any

from browsergym.core.registration import register_task
from browsergym.core.task import AbstractBrowserTask
from PIL import Image

PAGE = """
<body style="margin: 0; background: white">
<button style="width: 100px; height: 50px; float: left" onclick="while (true) {}">Spin</button>
<button style="width: 100px; height: 50px; float: left" onclick="document.title = 'broken'">Break</button>
</body>
"""


class OwnTask(AbstractBrowserTask):
    """A page of 400x300; an answer has a reward of 0.5, a report that it cannot be done one of 1."""

    def __init__(self, seed: int, images: int = 0, hint: str = "") -> None:
        super().__init__(seed)
        self.viewport = {"width": 400, "height": 300}
        self.images, self.hint = images, hint

    def setup(self, page: Any) -> tuple[Any, dict[str, Any]]:
        page.set_content(PAGE)
        image = io.BytesIO()
        Image.new("RGB", (20, 20), "blue").save(image, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"
        goal = [{"type": "text", "text": f"Answer.{self.hint}"}]
        return goal + [{"type": "image_url", "image_url": {"url": url}}] * self.images, {}

    def validate(self, page: Any, chat_messages: list[Any]) -> tuple[float, bool, str, Any]:
        if page.title() == "broken":
            raise RuntimeError("the evaluator broke")
        last = chat_messages[-1]
        if last["role"] == "infeasible":
            return 1.0, True, "", {}
        if last["role"] == "assistant":
            return (0.5 if last["message"] == 'it\'s "42"\n' else 0.0), True, "", {}
        return 0.0, False, "", {}


register_task("own.page", OwnTask)
register_task("own.image", OwnTask, task_kwargs={"images": 1})
