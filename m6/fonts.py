"""The font of Chinese text in plots and in grids of images."""

from __future__ import annotations

import functools
import sys
from pathlib import Path


@functools.cache
def chinese_font() -> Path | None:
    """Returns the file of Noto Sans SC with Chinese and Latin glyphs; None, with one warning, if it is missing."""
    try:
        from pylopdf_fonts_zh_cn import sans_path
    except ImportError:
        print(
            "warning: no Chinese font, so plots and grids show boxes: pip install pylopdf-fonts-zh-cn", file=sys.stderr
        )
        return None
    return Path(sans_path())
