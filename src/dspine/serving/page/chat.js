// The chat page: one conversation over /v1/chat/completions, its tokens coloured by where they came from.

const element = (id) => document.getElementById(id);
const log = element("log");
const messages = [];
let running = null; // the AbortController of the answer that is coming

function headers() {
  const key = element("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function setStatus(text, isError = false) {
  element("status").textContent = text;
  element("status").classList.toggle("error", isError);
}

async function errorOf(response) {
  const fallback = `the server answered ${response.status}`;
  try {
    return new Error((await response.json()).error.message || fallback);
  } catch {
    return new Error(fallback);
  }
}

let model = null;
async function findModel() {
  if (model === null) {
    const response = await fetch("/v1/models", { headers: headers() });
    if (!response.ok) {
      if (response.status === 401) document.querySelector("details").open = true;
      throw await errorOf(response);
    }
    model = (await response.json()).data[0].id;
    element("model").textContent = model;
  }
  return model;
}

function addArticle(kind) {
  const article = document.createElement("article");
  article.className = kind;
  article.setAttribute("aria-label", kind === "user" ? "You" : "Answer");
  log.append(article);
  return article;
}

// Neighbouring pieces of one origin share a span.
function addPiece(article, text, accepted) {
  if (!text) return;
  const kind = accepted ? "accepted" : "own";
  if (article.lastChild?.className !== kind) {
    const span = document.createElement("span");
    span.className = kind;
    article.append(span);
  }
  article.lastChild.textContent += text;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}

class Figures {
  constructor() {
    this.tokens = 0;
    this.first = null;
  }

  // Speed counts from the first token on, which the prompt's length does not slow.
  add(speculation) {
    const now = performance.now();
    const count = speculation.pieces.length;
    if (this.first === null) {
      this.first = now;
      this.atFirst = count;
    }
    this.tokens += count;
    const seconds = (now - this.first) / 1000;
    element("tokens").textContent = this.tokens;
    if (seconds > 0) element("speed").textContent = ((this.tokens - this.atFirst) / seconds).toFixed(1);
    if (speculation.rounds) element("tau").textContent = speculation.acceptance_length.toFixed(2);
  }
}

async function answer(article, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    signal,
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify({
      model: await findModel(),
      messages,
      stream: true,
      stream_options: { include_speculation: true },
      temperature: element("temperature").valueAsNumber || 0,
      max_tokens: element("max-tokens").valueAsNumber || 256,
    }),
  });
  if (!response.ok) throw await errorOf(response);
  const figures = new Figures();
  let reason = null;
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    if (!choice?.speculation) continue;
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    for (const { text, accepted } of choice.speculation.pieces) addPiece(article, text, accepted);
    figures.add(choice.speculation);
    reason = choice.finish_reason ?? reason;
    if (atEnd) log.scrollTop = log.scrollHeight;
  }
  return reason;
}

async function send(text) {
  running = new AbortController();
  element("send").disabled = true;
  element("stop").disabled = false;
  setStatus("Answering …");
  messages.push({ role: "user", content: text });
  addArticle("user").textContent = text;
  const article = addArticle("assistant");
  log.scrollTop = log.scrollHeight;
  const { signal } = running;
  try {
    const reason = await answer(article, signal);
    setStatus(reason === "length" ? "Cut at the longest answer; see the settings." : "Done.");
  } catch (error) {
    if (signal.aborted) setStatus("Stopped.");
    else setStatus(error.message, true);
  }
  if (article.isConnected) {
    // Keep what came, so that the conversation can go on; where nothing did, give the message back.
    if (article.textContent) {
      messages.push({ role: "assistant", content: article.textContent });
    } else {
      messages.pop();
      article.previousSibling.remove();
      article.remove();
      element("prompt").value ||= text;
    }
  }
  running = null;
  element("send").disabled = false;
  element("stop").disabled = true;
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = element("prompt").value.trim();
  if (!text || running) return;
  element("prompt").value = "";
  send(text);
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  element("form").requestSubmit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
element("stop").addEventListener("click", () => {
  running?.abort();
  element("prompt").focus();
});
element("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  log.querySelectorAll("article").forEach((article) => article.remove());
  setStatus("");
  element("prompt").focus();
});
element("colours").addEventListener("change", () => log.classList.toggle("colours", element("colours").checked));
element("key").addEventListener("change", () => findModel().then(() => setStatus(""), (error) => setStatus(error.message, true)));

log.classList.toggle("colours", element("colours").checked);
findModel().catch((error) => setStatus(error.message, true));
element("prompt").focus();
