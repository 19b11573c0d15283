// How search ranks what it finds; Sphinx's own, but for `score`.
var Scorer = {
  // A page with the words in its title comes before sections, functions and attributes with them.
  score: ([docname, title, anchor, , score]) => {
    const query = new URLSearchParams(window.location.search).get("q") || "";
    const named = title.toLowerCase();
    const words = query.toLowerCase().trim().split(/\s+/);
    if (anchor || docname.includes("/reference/") || !words.every((word) => named.includes(word)))
      return score;
    return score + (named.startsWith(words[0]) ? 40 : 30);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
