"""The report as one HTML page that works offline: everything it needs is in it, and it may load nothing.

``data`` makes what the charts show, ``parts`` the text; ``files`` puts them together with page.html, page.css, page.js.
"""
