"""The report as one HTML file. `render` fills and joins `page.html`, `body.html`, `page.css` and `page.js`."""
