"""Images as files."""

import io

from PIL import Image


def image(size: tuple[int, int] = (64, 64), form: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.effect_noise(size, 50).save(out, form)
    return out.getvalue()
