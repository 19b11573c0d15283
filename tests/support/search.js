// Print the pages that a site's search finds for each query, best first: node search.js SITE QUERY...
// The site's scripts run as they are, without a page to draw on.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const page = {
  document: { getElementById: () => ({}), querySelector: () => null },
  localStorage: { setItem: () => {} },
  location: {},
  DOCUMENTATION_OPTIONS: {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  URLSearchParams,
  _: (text) => text,
};
page.window = page;
vm.createContext(page);
const run = (file, change = (text) => text) =>
  vm.runInContext(change(fs.readFileSync(path.join(site, file), "utf8")), page, { filename: file });
run("_static/language_data.js");
// `Search` becomes a global, and doesn't wait for a page that is loaded.
const opened = (text) => text.replace(/^const Search =/m, "globalThis.Search =").replace(/^_ready\(.*$/m, "");
run("_static/searchtools.js", opened);
run("searchindex.js");
const found = queries.map((query) => {
  page.location.search = `?q=${encodeURIComponent(query)}`;
  const results = page.Search._performSearch(...page.Search._parseQuery(query));
  return results.reverse().map(([document, , anchor]) => document + anchor);
});
console.log(JSON.stringify(found));
