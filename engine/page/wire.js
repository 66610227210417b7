// What goes over the wire: the key, and streams of server-sent events read by fetch, which can carry a key where EventSource cannot.

const KEY = "forebay.key";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function key() {
  return sessionStorage.getItem(KEY) || "";
}

export function useKey(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

async function refusal(response) {
  let message = `status ${response.status}`;
  try {
    message = (await response.json()).error.message || message;
  } catch {
    // no body of ours: the status says what there is to say
  }
  return new Refused(response.status, message);
}

// The payloads of a stream, as texts. Throws Refused, and what fetch throws.
export async function* events(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (left + value).split("\n\n");
      left = parts.pop();
      for (const part of parts) {
        if (part.startsWith("data: ")) yield part.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
