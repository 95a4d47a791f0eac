
// The call forest of an episode: every model call once, what it continues, and the training row that has its loss.

const MOST_CALLS = 400; // more boxes help nobody, and a page must stay quick
const STEP_X = 108;
const BOX = { width: 94, height: 46 };
const STEP_Y = 58;
const SVG = "http://www.w3.org/2000/svg";

function makeSvg(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** Return the lane of each call: a call goes on in its parent's lane unless that went on already. */
function lanesOf(calls) {
  const lanes = new Map();
  const ends = new Map(); // lane -> id of its last call that others may continue
  let free = 0;
  for (const call of calls) {
    const parentLane = lanes.get(call.parent);
    const goesOn = call.kind !== "discarded" && parentLane !== undefined && ends.get(parentLane) === call.parent;
    const lane = goesOn ? parentLane : free;
    if (!goesOn) free += 1;
    lanes.set(call.id, lane);
    ends.set(lane, call.id);
  }
  return lanes;
}

/** Return the drawing and the table of rows, or a sentence where there is no call. */
function drawForest(record, turn) {
  const calls = record.call_records.slice(0, MOST_CALLS);
  const part = make("div", { class: "forest" }, make("h4", {}, "Model calls and training rows"));
  if (calls.length === 0) {
    part.append(make("p", { class: "facts" }, "The log's line lists no model call."));
    return part;
  }
  const lanes = lanesOf(calls);
  const places = new Map(calls.map((call, i) => [call.id, [10 + i * STEP_X, 8 + lanes.get(call.id) * STEP_Y]]));
  const width = calls.length * STEP_X + 10;
  const height = (Math.max(...lanes.values()) + 1) * STEP_Y + 8;
  const label = `${calls.length} model calls, ${record.row_records.length} training rows`;
  const drawing = makeSvg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const call of calls) {
    if (places.has(call.parent)) drawing.append(edge(places.get(call.parent), places.get(call.id)));
  }
  const boxes = new Map();
  for (const call of calls) {
    const box = callBox(call, places.get(call.id), call.turn === turn);
    boxes.set(call.id, box);
    drawing.append(box);
  }
  part.append(
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "call forest" }, drawing),
    make("p", { class: "facts" }, "Each box is a model call, in the order in which they were made; a line leads from the "
      + "call that it continues. The third line of a box names the row that trains it; dashed boxes train nowhere."),
  );
  if (record.call_records.length > MOST_CALLS) {
    part.append(make("p", { class: "facts" }, `Only the first ${MOST_CALLS} of ${record.call_records.length} are drawn.`));
  }
  part.append(rowsTable(record, boxes));
  return part;
}

function edge([x1, y1], [x2, y2]) {
  const [startX, startY, endX, endY] = [x1 + BOX.width, y1 + 22, x2, y2 + 22];
  const middle = (startX + endX) / 2;
  return makeSvg("path", { d: `M ${startX} ${startY} C ${middle} ${startY} ${middle} ${endY} ${endX} ${endY}` });
}

function callBox(call, [x, y], now) {
  const trained = call.row !== null && call.row !== undefined;
  const group = makeSvg("g", { class: `${trained ? "trained" : "unused"}${now ? " now" : ""}`, "data-call": call.id });
  const corner = call.kind === "summary" ? 16 : 2;
  const kind = call.kind === "turn" ? `turn ${call.turn}` : `${call.kind} ${call.turn}`;
  const third = trained ? `row ${call.row}` : "no loss";
  group.append(
    makeSvg("title", {}, `call ${call.id}: ${kind}, ${call.prompt_tokens} new prompt tokens, `
      + `${call.generated_tokens} generated, ${third}${call.truncated ? ", stopped by its length" : ""}`),
    makeSvg("rect", { x, y, ...BOX, rx: corner }),
    makeSvg("text", { x: x + 6, y: y + 14 }, kind.slice(0, 15)),
    makeSvg("text", { x: x + 6, y: y + 27 }, `+${call.prompt_tokens} → ${call.generated_tokens}`),
    makeSvg("text", { x: x + 6, y: y + 40 }, third),
  );
  return group;
}

/** Return the table of rows; the calls of the row that has the pointer or the focus are marked in the drawing. */
function rowsTable(record, boxes) {
  if (record.row_records.length === 0) {
    return make("p", { class: "facts" }, "No training row: nothing of this attempt trains.");
  }
  const body = make("tbody");
  record.row_records.forEach((row, number) => {
    const context = row.calls.filter((id) => !row.trains.includes(id));
    const button = make("button", { type: "button" }, `row ${number}`);
    const mark = (on) => row.calls.forEach((id) => boxes.get(id)?.classList.toggle("of-row", on));
    for (const [event, on] of [["focus", true], ["blur", false], ["mouseenter", true], ["mouseleave", false]]) {
      button.addEventListener(event, () => mark(on));
    }
    body.append(make("tr", {}, make("th", { scope: "row" }, button),
      make("td", {}, `${row.calls.length}`), make("td", {}, `${row.trains.length}`), make("td", {}, `${context.length}`),
      make("td", {}, `${row.prompt_tokens}`), make("td", {}, `${row.response_tokens}`),
      make("td", {}, `${row.trained_tokens}`)));
  });
  const heads = ["row", "calls", "with loss here", "context only", "prompt tokens", "response tokens", "trained tokens"];
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "training rows" },
    make("table", { class: "rows" }, head, body));
}
