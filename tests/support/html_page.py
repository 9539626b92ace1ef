"""A parser that holds HTML pages to be well-formed and self-contained."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Holds the page's tags against each other and collects what refers to something."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.ids = []
        self.links = []
        self.used = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in {"href", "src", "xlink:href", "action", "data"}:
                self.links.append(value)
            self.used += re.findall(r"url\(#([^)]+)\)", value or "")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in _VOID:
            self.open.pop()

    def handle_data(self, data):
        self.text += data

    def check(self):
        """Tags are closed, ids are unique, and nothing outside the page is referred to."""
        assert self.open == []
        assert all(link.startswith("#") for link in self.links), self.links
        assert len(self.ids) == len(set(self.ids))
        assert {link[1:] for link in self.links} | set(self.used) <= set(self.ids)
