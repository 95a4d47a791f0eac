
// The viewer: one turn after the other, several attempts side by side, and the keys of the whole page.

let open = null; // { index, beside: indices side by side, turn }, or null in the list

/** Return the attempt's line of the log, or null where the page does not hold it. */
function recordOf(i) {
  const holder = document.getElementById(`details-${i}`);
  return holder ? JSON.parse(holder.textContent) : null;
}

/** Return the indices of the attempts of the same group: all of its rollouts in their order. */
function groupOf(i) {
  if (!names.uid[columns.uid[i]]) return [i];
  const members = [];
  for (let j = 0; j < count; j += 1) {
    if (["uid", "step", "split"].every((name) => columns[name][j] === columns[name][i])) members.push(j);
  }
  return members.sort((a, b) => columns.rollout[a] - columns.rollout[b] || columns.attempt[a] - columns.attempt[b]);
}

function openEpisode(i) {
  const position = shown.indexOf(i);
  if (position >= 0) at = position;
  const same = groupOf(i).filter((j) => columns.rollout[j] === columns.rollout[i]);
  open = { index: i, beside: same, turn: 1 };
  byId("overview").hidden = true;
  byId("viewer").hidden = false;
  if (location.hash !== `#attempt-${i}`) history.replaceState(null, "", `#attempt-${i}`);
  drawChoice();
  drawEpisode();
  window.scrollTo(0, 0);
  byId("viewer-title").focus();
}

function closeEpisode() {
  if (!open) return;
  open = null;
  byId("viewer").hidden = true;
  byId("overview").hidden = false;
  history.replaceState(null, "", "#episodes");
  drawList();
  const row = byId("list").querySelector("tr[aria-current]");
  if (row) row.focus();
}

function drawChoice() {
  const i = open.index;
  const [site, question] = index.tasks[columns.task[i]];
  byId("viewer-title").textContent = names.task[columns.task[i]] || "(no task)";
  byId("question").textContent = [question, site && `Site: ${site}.`, `Step ${columns.step[i]}, group `
    + `${names.uid[columns.uid[i]] || "without a uid"}.`].filter(Boolean).join(" ");
  const choices = groupOf(i).map((j) => {
    const box = make("input", { type: "checkbox", value: `${j}` });
    box.checked = open.beside.includes(j);
    box.addEventListener("change", () => {
      open.beside = groupOf(i).filter((k) => (k === j ? box.checked : open.beside.includes(k)));
      drawEpisode();
    });
    return make("label", {}, box, ` ${attemptText(j)}: ${outcomeText(j)}`);
  });
  byId("beside").replaceChildren(make("legend", {}, "Side by side"), ...choices);
}

function drawEpisode() {
  const records = open.beside.map((j) => [j, recordOf(j)]);
  const last = Math.max(1, ...records.map(([, record]) => (record ? record.turn_records.length : 1)));
  open.turn = Math.min(last, Math.max(1, open.turn));
  byId("turn").textContent = `turn ${open.turn} of ${last}`;
  byId("previous-turn").disabled = open.turn === 1;
  byId("next-turn").disabled = open.turn === last;
  byId("columns").replaceChildren(...records.map(([j, record]) => episodeColumn(j, record)));
}

function episodeColumn(j, record) {
  const column = make("article", { class: "episode" }, make("h3", {}, attemptText(j)));
  const where = `${index.files[columns.file[j]]}, line ${columns.line[j]}`;
  column.append(make("p", { class: "mark" }, outcomeText(j)), facts([
    ["reward", columns.reward[j] === null ? "none" : columns.reward[j]], ["stop", names.stop[columns.stop[j]]],
    ["turns", columns.turns[j]], ["seconds", columns.seconds[j]], ["tokens", columns.tokens[j]],
    ["ended", `${utc(index.base + columns.ended[j])} UTC`], ["log", where],
  ]));
  if (!record) {
    const name = names.uid[columns.uid[j]] || names.task[columns.task[j]];
    column.append(make("p", {}, `This page does not hold its turns. They are in ${where}; a page with them: `),
      make("pre", {}, `python episode_report.py RUN_DIR --include ${name}`));
    return column;
  }
  column.append(facts([
    ["fault", record.failure_fault], ["evidence", record.failure_evidence], ["last call", record.last_call],
    ["answer", record.answer], ["scored by", record.scored_by], ["judge", record.judge_reason],
    ["generation s", record.generation_s], ["environment s", record.environment_s], ["waiting s", record.waiting_s],
    ["judge s", record.judge_s || ""], ["compactions", record.compactions || ""], ["cut calls", record.cut_calls || ""],
  ]));
  if (record.texts_left_out) {
    column.append(make("p", { class: "facts" }, `The log's line holds no texts (${record.texts_left_out}).`));
  }
  column.append(turnPart(record), drawForest(record, open.turn));
  return column;
}

function facts(pairs) {
  const words = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return make("p", { class: "facts" }, words.map(([name, value]) => `${name}: ${value}`).join(" · "));
}

function turnPart(record) {
  const turn = record.turn_records[open.turn - 1];
  const part = make("div", { class: "turn" });
  if (!turn) {
    const over = record.turn_records.length ? `It ended after turn ${record.turn_records.length}.` : "No turn was played.";
    part.append(make("p", {}, over));
    if (!record.turn_records.length) part.append(...shownPage("The start page", record.start_page));
    return part;
  }
  const before = record.turn_records[open.turn - 2];
  if (turn.compaction_before) {
    part.append(make("p", { class: "mark" }, "A fresh context begins here."));
    if (before && before.summary) part.append(make("h4", {}, "What it wrote down for it"), make("pre", {}, before.summary));
  }
  part.append(...(before ? cameBack("What the policy saw", before) : shownPage("What the policy saw", record.start_page)));
  const set = Object.entries(turn.arguments || {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`);
  part.append(make("h4", {}, "What it answered"),
    make("p", { class: "mark" }, [turn.action || `no usable call: ${turn.mistake}`, ...set,
      turn.element && `(${turn.element})`].filter(Boolean).join(" ")));
  if (turn.discarded && turn.discarded.length) {
    part.append(make("p", { class: "facts" }, `Generated anew after: ${turn.discarded.join(", ")}`));
  }
  part.append(make("pre", {}, turn.reply || "(no text in the log)"), facts([
    ["context tokens", turn.prompt_tokens], ["generated tokens", turn.generated_tokens],
    ["generation s", turn.generation_s], ["environment s", turn.environment_s],
  ]), ...cameBack("What came back", turn));
  return part;
}

/** Return what a turn led to: a page, an error, or a word about neither. */
function cameBack(title, turn) {
  if (turn.observation) return shownPage(title, turn.observation);
  if (turn.error || turn.failure_kind) {
    return [make("h4", {}, title), make("p", { class: "mark" }, `! ${turn.failure_kind}`), make("pre", {}, turn.error || "")];
  }
  let text = "Nothing was run.";
  if (turn.mistake) text = `A sentence about the mistake: ${turn.mistake}.`;
  else if (turn.action === "finish") text = "The episode was over, and was scored.";
  return [make("h4", {}, title), make("p", {}, text)];
}

function shownPage(title, page) {
  if (!page) return [make("h4", {}, title), make("p", {}, "No page.")];
  const cut = page.text.length < page.chars ? `, of ${page.chars} characters` : "";
  return [make("h4", {}, title), facts([["address", page.url], ["sha256", `${page.sha256.slice(0, 12)}…${cut}`]]),
    make("pre", {}, page.text || "(no text in the log)")];
}

function walkTurns(by) {
  open.turn += by;
  drawEpisode();
}

function walkEpisodes(by) {
  const position = shown.indexOf(open.index) + by;
  if (position >= 0 && position < shown.length) openEpisode(shown[position]);
}

const LIST_KEYS = {
  ArrowDown: () => walkList(1), j: () => walkList(1), ArrowUp: () => walkList(-1), k: () => walkList(-1),
};
const EPISODE_KEYS = {
  ArrowRight: () => walkTurns(1), j: () => walkTurns(1), ArrowLeft: () => walkTurns(-1), k: () => walkTurns(-1),
  n: () => walkEpisodes(1), p: () => walkEpisodes(-1),
};

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  const target = event.target;
  if (event.key === "Escape") {
    if (open) closeEpisode();
    else if (target.matches("input, select")) target.blur();
    return;
  }
  // Whoever types, chooses or scrolls a box keeps the keys that this is done with.
  if (target.matches("input[type=search], select")) return;
  if (target.matches(".scroll, pre") && event.key.startsWith("Arrow")) return;
  if (event.key === "/") {
    event.preventDefault();
    closeEpisode();
    byId("search").focus();
  } else if (!open && event.key === "Enter" && target.matches("#list tbody tr")) {
    event.preventDefault();
    openEpisode(Number(target.dataset.index));
  } else {
    const keys = open ? EPISODE_KEYS : LIST_KEYS;
    // Arrows walk the list only from the list: elsewhere they scroll the page.
    if (!open && event.key.startsWith("Arrow") && !target.closest("#list")) return;
    if (!Object.hasOwn(keys, event.key)) return;
    event.preventDefault();
    keys[event.key]();
  }
}

function followHash() {
  const found = /^#attempt-(\d+)$/.exec(location.hash);
  if (found && Number(found[1]) < count) openEpisode(Number(found[1]));
  else if (open && !found) closeToOverview();
}

/** Leave the viewer for a section that the address names. */
function closeToOverview() {
  open = null;
  byId("viewer").hidden = true;
  byId("overview").hidden = false;
  const section = location.hash && document.getElementById(location.hash.slice(1));
  if (section) section.scrollIntoView();
}

const THEMES = ["system", "light", "dark"];
byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme || "system";
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  if (next === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  byId("theme").textContent = `Colours: ${next}`;
});
byId("back").addEventListener("click", closeEpisode);
byId("previous-turn").addEventListener("click", () => walkTurns(-1));
byId("next-turn").addEventListener("click", () => walkTurns(1));
byId("previous-episode").addEventListener("click", () => walkEpisodes(-1));
byId("next-episode").addEventListener("click", () => walkEpisodes(1));
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", followHash);
applyFilters();
followHash();
