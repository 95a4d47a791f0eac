
"use strict";
// The list of episodes: search, filters, order, pages. Texts reach the page as text nodes alone, never as markup.

const index = JSON.parse(document.getElementById("index").textContent);
const columns = index.columns;
const names = index.names;
const count = columns.step.length;
const held = new Set(index.details);
const PAGE_ROWS = 50;
const MARKS = { success: "✓", partial: "◐", failure: "✗", invalid: "!" };

const byId = (id) => document.getElementById(id);

/** Return a new element: attributes as an object, children as elements or texts. */
function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children.filter((child) => child !== "" && child !== null && child !== undefined));
  return made;
}

function utc(seconds) {
  const date = new Date(seconds * 1000);
  return Number.isNaN(date.getTime()) ? "?" : date.toISOString().slice(0, 19).replace("T", " ");
}

function outcomeText(i) {
  const outcome = names.outcome[columns.outcome[i]];
  const kind = names.kind[columns.kind[i]];
  return `${MARKS[outcome] || "?"} ${outcome}${kind ? `: ${kind}` : ""}`;
}

function attemptText(i) {
  return `rollout ${columns.rollout[i]}, attempt ${columns.attempt[i]}${columns.final[i] ? "" : " (tried again)"}`;
}

// What is searched, made once: a task's words are shared by all its episodes.
const taskWords = names.task.map((task, t) => `${task} ${index.tasks[t].join(" ")}`.toLowerCase());
const otherWords = ["uid", "kind", "outcome", "stop", "split"].map((name) => names[name].map((n) => n.toLowerCase()));

/** Return whether every word is in the task's words or in one of the names of an episode. */
function matches(i, words) {
  const row = [
    taskWords[columns.task[i]],
    otherWords[0][columns.uid[i]],
    otherWords[1][columns.kind[i]],
    otherWords[2][columns.outcome[i]],
    otherWords[3][columns.stop[i]],
    otherWords[4][columns.split[i]],
  ];
  return words.every((word) => row.some((text) => text.includes(word)));
}

let shown = []; // indices of the episodes that the filters leave, in their order
let at = 0; // position of the current episode in `shown`

function applyFilters() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = ["split", "outcome", "kind"].map((name) => [columns[name], byId(name).value]);
  const onlyHeld = byId("held").checked;
  shown = [];
  for (let i = 0; i < count; i += 1) {
    if (onlyHeld && !held.has(i)) continue;
    if (wanted.some(([column, value]) => value !== "" && column[i] !== Number(value))) continue;
    if (words.length === 0 || matches(i, words)) shown.push(i);
  }
  const order = byId("order").value;
  if (order === "newest") shown.reverse();
  else if (order !== "oldest") shown.sort((a, b) => columns[order][b] - columns[order][a] || a - b);
  at = 0;
  drawList();
}

function drawList() {
  const first = Math.floor(at / PAGE_ROWS) * PAGE_ROWS;
  const rows = shown.slice(first, first + PAGE_ROWS).map((i, offset) => listRow(i, first + offset));
  byId("list").tBodies[0].replaceChildren(...rows);
  byId("found").textContent = `${shown.length} of ${count} attempts`;
  const pages = Math.max(1, Math.ceil(shown.length / PAGE_ROWS));
  byId("page").textContent = `page ${Math.floor(at / PAGE_ROWS) + 1} of ${pages}`;
  byId("before").disabled = first === 0;
  byId("after").disabled = first + PAGE_ROWS >= shown.length;
}

function listRow(i, position) {
  const [site, question] = index.tasks[columns.task[i]];
  const cells = [
    ["step", columns.step[i]],
    ["attempt", attemptText(i)],
    ["outcome", outcomeText(i)],
    ["turns", columns.turns[i]],
    ["seconds", columns.seconds[i].toFixed(1)],
    ["tokens", columns.tokens[i]],
    ["ended", utc(index.base + columns.ended[i])],
  ];
  const title = names.task[columns.task[i]] || site || "(no task)";
  const link = make("a", { href: `#attempt-${i}` }, title);
  const row = make("tr", { tabindex: position === at ? "0" : "-1" });
  if (position === at) row.setAttribute("aria-current", "true");
  link.tabIndex = -1;
  row.append(make("th", { scope: "row" }, link, make("span", { class: "question" }, question)));
  for (const [name, value] of cells) row.append(make("td", { "data-name": name }, `${value}`));
  row.dataset.index = i;
  row.dataset.position = position;
  row.addEventListener("click", (event) => {
    event.preventDefault();
    openEpisode(i);
  });
  row.addEventListener("focus", () => {
    if (at !== position) markRow(position);
  });
  return row;
}

/** Make a row of this page of the list the current one, without drawing the page anew. */
function markRow(position) {
  at = position;
  for (const row of byId("list").tBodies[0].rows) {
    const current = Number(row.dataset.position) === at;
    row.tabIndex = current ? 0 : -1;
    if (current) row.setAttribute("aria-current", "true");
    else row.removeAttribute("aria-current");
  }
}

/** Go to another row of the list, on whichever page it is, and give it the focus. */
function walkList(by) {
  if (shown.length === 0) return;
  at = Math.min(shown.length - 1, Math.max(0, at + by));
  drawList();
  const row = byId("list").querySelector("tr[aria-current]");
  row.focus();
}

function turnPage(by) {
  const page = Math.floor(at / PAGE_ROWS) + by;
  at = Math.min(Math.max(0, page * PAGE_ROWS), Math.max(0, shown.length - 1));
  drawList();
}

function fillChoices() {
  for (const name of ["split", "outcome", "kind"]) {
    const choices = names[name].map((text, value) => [text, value]).sort((a, b) => (a[0] < b[0] ? -1 : 1));
    for (const [text, value] of choices) {
      if (name !== "kind" || text) byId(name).append(make("option", { value: `${value}` }, text || "(none)"));
    }
  }
}

fillChoices();
byId("filters").addEventListener("submit", (event) => event.preventDefault());
byId("filters").addEventListener("input", applyFilters);
byId("before").addEventListener("click", () => turnPage(-1));
byId("after").addEventListener("click", () => turnPage(1));
