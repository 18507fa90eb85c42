"""The pictures as a tool server: verifiers starts this module as a process, once for each environment worker."""

import verifiers.v1 as vf
from mcp.types import ImageContent
from verifiers.v1.mcp import SharedToolsetConfig

from sample_looking.pictures import picture_names, pictures


class PicturesConfig(SharedToolsetConfig):
    """What the taskset says of its pictures: the same settings, the same pictures."""

    num_examples: int
    num_pictures: int
    seed: int


class PictureServer(vf.Toolset[PicturesConfig]):
    """Shows pictures by their names."""

    TOOL_PREFIX = None

    async def setup(self) -> None:
        """Draw the pictures."""
        number = self.config.num_examples * self.config.num_pictures
        names = picture_names(number, self.config.seed)
        self._urls = {name: each.url for name, each in zip(names, pictures(number, self.config.seed), strict=True)}

    @vf.tool
    def look(self, name: str) -> ImageContent | str:
        """Show a picture."""
        media, _, data = self._urls.get(name, "").removeprefix("data:").partition(";base64,")
        return ImageContent(type="image", data=data, mime_type=media) if data else "nothing"


if __name__ == "__main__":
    PictureServer.run()
