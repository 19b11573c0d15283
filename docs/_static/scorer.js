// How search ranks what it finds; Sphinx's own, but for `score`.
var Scorer = {
  // A page whose title has the words comes before a function or an attribute of that name.
  score: ([docname, , anchor, , score]) =>
    score >= 15 && !anchor && !docname.includes("/reference/") ? score + 15 : score,
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
