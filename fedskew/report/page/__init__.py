"""The report as one HTML file: `page.html`, `page.css` and `page.js`, filled and joined by `render`."""
