"""Rules that tell a picture with a caption from buttons, banners and blank pages."""

from __future__ import annotations

from PIL import ImageStat

from m6.data.corpus.quality import chinese_share
from m6.data.corpus.recipe import PictureFilterSettings
from m6.data.sources.pictures import Decoded, on_white


def problem_of_picture(decoded: Decoded, settings: PictureFilterSettings) -> str | None:
    """Returns the first rule that a picture breaks, None if it breaks none.

    Args:
        decoded: the shrunken picture, with what is known of its file.
        settings: thresholds.
    """
    shorter, longer = sorted((decoded.width, decoded.height))
    if shorter < settings.min_side:
        return "side too short"
    if longer > settings.max_aspect * shorter:
        return "too long and narrow"
    if decoded.is_animated and not settings.allow_animation:
        return "animation"
    if max(ImageStat.Stat(on_white(decoded.picture)).stddev) < settings.min_contrast:
        return "blank picture"
    return None


def problem_of_caption(caption: str, settings: PictureFilterSettings) -> str | None:
    """Returns the first rule that a caption in its stored form breaks, None if it breaks none."""
    if len(caption) < settings.min_caption_chars:
        return "caption too short"
    if len(caption) > settings.max_caption_chars:
        return "caption too long"
    if chinese_share(caption) < settings.min_chinese_share:
        return "too little Chinese"
    return None
