"""Lines of web pages that are no text: buttons, notices, scripts."""

from __future__ import annotations

import re

# A line is removed only if it is short: a long one is a sentence that mentions the words.
_MAX_LINE_CHARS = 60
# Lines with code or a policy: the rules of C4 (Raffel et al. 2020, section 2.2), with the Chinese words for them.
_C4 = r"javascript|lorem ipsum|cookie|隐私(?:政策|声明)|用户协议|使用条款"
# Lines that Chinese pages share: notices of rights, editors, navigation, sharing, advertisements.
_NOTICES = (
    r"^\W*(?:责任编辑|责编|编辑|作者|来源|原标题|本文来源|文章来源|免责声明|版权声明)\s*[:：]"
    r"|版权所有|未经.{0,8}(?:授权|许可).{0,8}(?:转载|使用)|copyright|all rights reserved|ICP备|ICP证|公网安备"
    r"|^\W*(?:首页|上一[页篇]|下一[页篇]|返回顶部|返回首页|返回列表|更多>*|查看更多|阅读全文|展开全文|点击查看|点击进入|点击下载"
    r"|分享到|收藏|打印|关闭|登录|注册|举报|评论|我要评论|相关阅读|相关推荐|热门推荐|推荐阅读|广告)\W*$"
    r"|扫(?:一扫|描).{0,6}二维码|关注.{0,12}(?:公众号|微信)|下载.{0,8}(?:APP|客户端)"
)
_BOILERPLATE = re.compile(f"{_C4}|{_NOTICES}", re.IGNORECASE)


def remove_boilerplate(text: str) -> tuple[str, int]:
    """Removes the lines of a page that are no text.

    Returns:
        The other lines, and how many were removed.
    """
    lines = text.split("\n")
    kept = [line for line in lines if len(line) > _MAX_LINE_CHARS or not _BOILERPLATE.search(line)]
    return "\n".join(kept), len(lines) - len(kept)
