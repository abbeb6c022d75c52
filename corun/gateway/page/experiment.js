// Streams and crowds on a server of OpenAI's API, as any client has them. Nothing here draws on the page.

import { ask, events } from "./frame.js";

const NEIGHBOUR_TOKENS = 64; // What a neighbour draws. It then ends, and another one comes.
const LONG_CHARACTERS = 3000;
const TRIES = 3; // After so many errors in a row, a lane of the crowd gives up.
const FIRST_TOKEN_S = 60; // How long the crowd may take until its first token.
const QUESTIONS = [
  "Why is the sky blue?", "What is a prime number?", "Who wrote Faust?", "How do bees find their way home?",
  "What is photosynthesis?", "Name three rivers of Africa.", "Why does ice float?", "What is a black hole?",
  "How is glass made?", "What does a compiler do?", "Why do leaves fall?", "What is the longest bone?",
];
const FILLER =
  "The harbour was quiet that morning, and the boats lay side by side in the mist while the town above them woke up. ";

/** An error that the page shows. status: the HTTP status, 0 if there is none. */
export class Failure extends Error {
  constructor(message, { status = 0, retryAfterS = 0 } = {}) {
    super(message);
    this.status = status;
    this.retryAfterS = retryAfterS;
  }
}

const view = new DataView(new ArrayBuffer(4));

/** Return the 32 bits of a number as an fp32, as 8 hex digits. A number of JSON is a double, which holds each fp32. */
export function bitsOf(value) {
  view.setFloat32(0, value);
  return view.getUint32(0).toString(16).padStart(8, "0");
}

/** A server of OpenAI's API: this page's own gateway, or another one, which the browser calls itself. */
export class Server {
  /** url: up to and with /v1; empty: the own gateway. key: an API key for another server; the token never goes there. */
  constructor(url = "", key = "") {
    this.url = url.replace(/\/+$/, "");
    this.key = key;
  }

  get isOwn() {
    return this.url === "";
  }

  /** Return the answer to a request. Throws Failure if it is an error, or if there is none. */
  async call(path, { body, signal } = {}) {
    const headers = body === undefined ? {} : { "Content-Type": "application/json" };
    if (!this.isOwn && this.key) headers.Authorization = `Bearer ${this.key}`;
    const options = { method: body === undefined ? "GET" : "POST", body, headers, signal };
    let response;
    try {
      const foreign = { ...options, mode: "cors", credentials: "omit", cache: "no-store", redirect: "error" };
      response = await (this.isOwn ? ask(path, options) : fetch(this.url + path.replace(/^\/v1/, ""), foreign));
    } catch (error) {
      if (signal?.aborted) throw error;
      const hint = "is not there, or does not allow this page's origin (CORS)";
      throw new Failure(this.isOwn ? "the gateway does not answer" : `${this.url} ${hint}`);
    }
    if (!response.ok) throw await failureOf(response);
    return response;
  }

  /** Return the name of the model and its length in tokens. */
  async model(signal) {
    const found = await json(await this.call("/v1/models", { signal }));
    const card = found.data?.[0];
    if (!card?.id) throw new Failure("the server names no model");
    return { id: card.id, length: card.max_model_len ?? 2048 };
  }

  /** Yield the choices of a stream as they come, each with `fingerprint` if it is known then. */
  async *stream(body, signal) {
    const response = await this.call("/v1/completions", { body, signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const event = parsed(data);
      const error = event.error ?? (event.object === "error" ? event : null);
      if (error) throw new Failure(error.message ?? "the stream ended with an error");
      for (const choice of event.choices ?? []) yield { ...choice, fingerprint: event.system_fingerprint };
    }
    throw new Failure("the stream ended before its end was told");
  }
}

/** Return why no node can be killed now; empty: one can be. */
export async function killRefused() {
  return (await json(await new Server().call("/playground/kill"))).refused;
}

/** Kill the node that runs a request, and return its name. */
export async function killNodeOf(requestId) {
  const body = JSON.stringify({ request_id: requestId });
  return (await json(await new Server().call("/playground/kill", { body }))).killed;
}

async function json(response) {
  return parsed(await response.text());
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Failure("the server's answer is not JSON");
  }
}

async function failureOf(response) {
  const retryAfterS = Number(response.headers.get("Retry-After")) || 0;
  let message = `the server answered ${response.status}`;
  try {
    const found = JSON.parse(await response.text());
    message = found.error?.message ?? found.message ?? message;
  } catch {
    // The status says it.
  }
  return new Failure(message, { status: response.status, retryAfterS });
}

/** One run of the prompt: its tokens with their bits, and what is known of it. */
export class Run {
  constructor(name) {
    this.name = name;
    this.requestId = `playground-${crypto.getRandomValues(new Uint32Array(3)).join("-")}`;
    this.tokens = []; // {text, key, hex, isFp32}; key: what tells tokens apart, the id where the server gives it.
    this.state = "waiting"; // waiting, running, done, failed or stopped
    this.why = "";
    this.finishReason = "";
    this.receipt = null;
    this.fingerprint = "";
    this.seconds = 0;
    this.kill = null; // {at, node, why}
    this.beside = null; // {most, tokens}: how many neighbours drew at once, and how many tokens all of them drew.
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Stream the prompt, and call `onToken` after each token. settings: prompt, seed (digits), maxTokens, temperature. */
  async stream(server, model, settings, signal, onToken) {
    const body = {
      model: model.id, prompt: settings.prompt, max_tokens: settings.maxTokens, temperature: settings.temperature,
      stream: true, logprobs: 1,
    };
    if (server.isOwn) Object.assign(body, { return_token_ids: true, request_id: this.requestId });
    // A seed has up to 63 bits, which is more than a number of JavaScript holds.
    const text = JSON.stringify(body).replace(/}$/, `,"seed":${settings.seed}}`);
    const began = performance.now();
    this.state = "running";
    for await (const choice of server.stream(text, signal)) {
      this.#take(choice, onToken);
      this.seconds = (performance.now() - began) / 1000;
    }
    if (!this.tokens.length) throw new Failure("the stream had no token");
  }

  #take(choice, onToken) {
    const { tokens = [], token_logprobs: values = [] } = choice.logprobs ?? {};
    if (choice.text && !tokens.length) throw new Failure("the server gives no log probabilities, so no bits");
    tokens.forEach((text, index) => {
      const value = values[index];
      const key = choice.token_ids?.[index] ?? text;
      this.tokens.push({ text, key, hex: bitsOf(value), isFp32: Math.fround(value) === value });
      onToken(this.tokens.length - 1);
    });
    this.finishReason = choice.finish_reason ?? this.finishReason;
    this.fingerprint = choice.fingerprint ?? this.fingerprint;
    this.receipt = choice.corun?.receipt ?? this.receipt;
  }
}

/** Return the index of the first token at which a run has other bits than another one; -1 if there is none so far. A run
 * that has ended early differs where the other one goes on. */
export function firstDifference(reference, run) {
  const both = Math.min(reference.tokens.length, run.tokens.length);
  for (let index = 0; index < both; index++) {
    const [one, other] = [reference.tokens[index], run.tokens[index]];
    if (one.key !== other.key || one.hex !== other.hex) return index;
  }
  const ended = reference.state === "done" && run.state === "done";
  return ended && reference.tokens.length !== run.tokens.length ? both : -1;
}

/** Other requests of the same client, of low priority. Each kind has one connection: a browser opens six to a server. */
export class Crowd {
  /** settings: prompt, maxTokens, and size and kinds of the crowd. onChange: is called as its numbers change. */
  constructor(server, model, settings, onChange) {
    this.tokens = 0; // All that neighbours have drawn.
    this.drawing = 0; // Neighbours that have drawn a token and go on.
    this.error = "";
    this.onChange = onChange;
    this.size = settings.size;
    this.lanes = settings.kinds.map((kind, index) => {
      const share = Math.floor(settings.size / settings.kinds.length);
      const count = share + (index < settings.size % settings.kinds.length ? 1 : 0);
      return { kind, count };
    });
    this.lanes = this.lanes.filter((lane) => lane.count > 0);
    this.living = this.lanes.length;
    this.stopping = new AbortController();
    this.first = new Promise((resolve, reject) => Object.assign(this, { begun: resolve, failed: reject }));
    this.first.catch(() => {}); // Whoever waits for it is told.
    this.#server = server;
    this.#model = model;
    this.#settings = settings;
  }

  #server;
  #model;
  #settings;

  /** Let neighbours come until `stop`. Resolves when the first one has drawn a token; throws Failure if none does. */
  async start(signal) {
    const stop = () => this.stop();
    signal.addEventListener("abort", stop, { once: true });
    const late = setTimeout(() => this.failed(new Failure("no neighbour has drawn a token in time")), FIRST_TOKEN_S * 1000);
    this.lanes.forEach((lane) => this.#keep(lane));
    try {
      await this.first;
    } finally {
      clearTimeout(late);
    }
  }

  /** End all neighbours. */
  stop() {
    this.stopping.abort();
    this.failed(new DOMException("stopped", "AbortError"));
  }

  async #keep(lane) {
    const signal = this.stopping.signal;
    let errors = 0;
    for (let round = 0; !signal.aborted && errors < TRIES; round++) {
      try {
        await this.#round(lane, round);
        errors = 0;
      } catch (error) {
        if (signal.aborted) break;
        errors += 1;
        this.error = error.message;
        this.onChange();
        await pause(Math.max(1, error.retryAfterS ?? 0), signal);
      }
    }
    this.living -= 1;
    if (!this.living && !signal.aborted) this.failed(new Failure(`the crowd cannot run: ${this.error}`));
  }

  async #round({ kind, count }, round) {
    const body = {
      model: this.#model.id, prompt: this.#prompts(kind, count, round), temperature: 1, stream: true,
      max_tokens: kind === "same" ? Math.min(NEIGHBOUR_TOKENS, this.#settings.maxTokens) : NEIGHBOUR_TOKENS,
    };
    // Stock vLLM 0.26 on a CPU forgets a request's seed beside requests without one, and dies of a long prompt with one.
    if (kind !== "long") body.seed = Math.floor(2 ** 31 * Math.random());
    if (this.#server.isOwn) Object.assign(body, { return_token_ids: true, priority: "low" });
    const running = new Set();
    try {
      for await (const choice of this.#server.stream(JSON.stringify(body), this.stopping.signal)) {
        this.#count(running, choice);
      }
    } finally {
      this.drawing -= running.size;
      this.onChange();
    }
  }

  #count(running, choice) {
    if (!running.has(choice.index)) {
      running.add(choice.index);
      this.drawing += 1;
    }
    this.tokens += choice.token_ids?.length ?? 1;
    if (choice.finish_reason) {
      running.delete(choice.index);
      this.drawing -= 1;
    }
    this.begun();
    this.onChange();
  }

  #prompts(kind, count, round) {
    const length = Math.max(16, Math.min(LONG_CHARACTERS, this.#model.length - NEIGHBOUR_TOKENS - 16));
    const made = {
      short: (number) => `${QUESTIONS[number % QUESTIONS.length]} (${number})`,
      long: (number) => `Page ${number}. ${FILLER.repeat(Math.ceil(length / FILLER.length))}`.slice(0, length),
      same: () => this.#settings.prompt,
    }[kind];
    return Array.from({ length: count }, (_, index) => made(round * count + index + 1));
  }
}

function pause(seconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => (clearTimeout(timer), resolve()), { once: true });
  });
}
