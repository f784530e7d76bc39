"""The report as one HTML file. `render` fills and joins `page.html`, `page.css` and `page.js`."""
