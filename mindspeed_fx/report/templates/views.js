"use strict";
// One view at a time: a button for each, drawn when it is first shown.

/**
 * views: name -> [draw, is there]; what is not there gets no button. Returns a function that shows one.
 * words: name -> what its button says, where that is not the name.
 */
function showViews(bar, views, words = {}) {
  const drawn = new Set(), there = Object.keys(views).filter((name) => views[name][1]);
  const show = (name) => {
    for (const view of Object.keys(views)) { const place = document.getElementById(`view-${view}`); if (place) place.hidden = view !== name; }
    for (const button of bar.children) button.setAttribute("aria-selected", button.dataset.view === name);
    if (!drawn.has(name)) { drawn.add(name); views[name][0](); }
  };
  for (const name of there) {
    const button = document.createElement("button");
    button.type = "button"; button.role = "tab"; button.dataset.view = name; button.textContent = words[name] ?? name;
    button.setAttribute("aria-controls", `view-${name}`);
    button.onclick = () => show(name);
    bar.append(button);
  }
  bar.onkeydown = (event) => {
    const at = [...bar.children].indexOf(document.activeElement), step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (at >= 0 && step) { const next = bar.children[(at + step + bar.children.length) % bar.children.length]; next.focus(); next.click(); event.preventDefault(); }
  };
  bar.hidden = false;
  if (there.length) show(there[0]);
  return show;
}
