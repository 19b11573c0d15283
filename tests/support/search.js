// Print what a site's search finds for each query, best first: node search.js SITE QUERY...
// The page's scripts run as they are; what they would draw is left out.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [site, ...queries] = process.argv.slice(2);
const nothing = { getElementById: () => ({}), querySelector: () => null };
const page = { document: nothing, localStorage: { setItem: () => {} }, DOCUMENTATION_OPTIONS: {}, SPHINX_HIGHLIGHT_ENABLED: false };
page.window = page;
page._ready = () => {};
vm.createContext(page);
const static_ = path.join(site, "_static");
const files = ["doctools.js", "language_data.js", "searchtools.js"].map((name) => path.join(static_, name));
for (const file of [...files, path.join(site, "searchindex.js")]) {
  const text = fs.readFileSync(file, "utf8").replace(/^_ready\(.*$/gm, "").replace(/^const (Search|Documentation) =/gm, "globalThis.$1 =");
  vm.runInContext(text, page, { filename: file });
}
const found = queries.map((query) => {
  const results = page.Search._performSearch(...page.Search._parseQuery(query));
  return results.reverse().map(([document, title, anchor]) => document + anchor);
});
console.log(JSON.stringify(found));
