// A robot in another language, from docs/develop/protocol.md alone. It asks for answers, and verifies them itself:
// node --experimental-websocket robot.mjs ws://HOST:PORT tokenizer.safetensors
import { readFileSync } from "node:fs";

// msgpack: what is sent has one form each, what comes may have any.
const head = (tag, n) => { const b = Buffer.alloc(5, tag); b.writeUInt32BE(n, 1); return b; };
const wide = (tag, write) => { const b = Buffer.alloc(9, tag); write(b); return b; };
function pack(v) {
  if (v === null) return Buffer.from([0xc0]);
  if (Number.isInteger(v)) return wide(0xcf, (b) => b.writeBigUInt64BE(BigInt(v), 1));
  if (typeof v === "number") return wide(0xcb, (b) => b.writeDoubleBE(v, 1));
  if (typeof v === "string") return Buffer.concat([head(0xdb, Buffer.byteLength(v)), Buffer.from(v)]);
  if (v instanceof Uint8Array) return Buffer.concat([head(0xc6, v.length), v]);
  if (Array.isArray(v)) return Buffer.concat([head(0xdd, v.length), ...v.map(pack)]);
  return Buffer.concat([head(0xdf, Object.keys(v).length), ...Object.entries(v).flat().map(pack)]);
}
function unpack(b) {
  let at = 0;
  const take = (n) => b.subarray(at, (at += n)), uint = (n) => Number(`0x${take(n).toString("hex")}`);
  const int = (n) => Number(BigInt.asIntN(8 * n, BigInt(`0x${take(n).toString("hex")}`)));
  const text = (n) => take(n).toString(), list = (n) => Array.from({ length: n }, value);
  const map = (n) => Object.fromEntries(Array.from({ length: n }, () => [value(), value()]));
  // From 0xc0 on: what is read, and the bytes of its size or number.
  const forms = [
    [() => null], [], [() => false], [() => true], [take, 1], [take, 2], [take, 4], [], [], [],
    [() => take(4).readFloatBE()], [() => take(8).readDoubleBE()],
    ...[1, 2, 4, 8].map((n) => [() => uint(n)]), ...[1, 2, 4, 8].map((n) => [() => int(n)]), [], [], [], [], [],
    [text, 1], [text, 2], [text, 4], [list, 2], [list, 4], [map, 2], [map, 4],
  ];
  function value() {
    const t = uint(1);
    if (t < 0x80 || t > 0xdf) return t < 0x80 ? t : t - 256;
    if (t < 0xc0) return t < 0x90 ? map(t & 15) : t < 0xa0 ? list(t & 15) : text(t & 31);
    const [read, size] = forms[t - 0xc0];
    return size ? read(uint(size)) : read();
  }
  const v = value();
  if (at !== b.length) throw Error("bytes after the message");
  return v;
}

// Arrays: the bytes of those that [name, dtype, shape] say, in this order.
const TYPES = { bool: Uint8Array, int64: BigInt64Array, float32: Float32Array, float64: Float64Array };
const sum = (a) => a.reduce((x, y) => x + y, 0), product = (a) => a.reduce((x, y) => x * y, 1);
const bytes = (array) => Buffer.from(array.buffer);
const join = (specs, arrays) => Buffer.concat(specs.map(([name]) => bytes(arrays[name])));
function split(specs, payload) {
  let at = 0;
  const arrays = specs.map(([name, dtype, shape]) => {
    const length = TYPES[dtype].BYTES_PER_ELEMENT * product(shape);
    const array = new TYPES[dtype](new Uint8Array(payload.subarray(at, (at += length))).buffer);
    if (dtype.startsWith("float") && !array.every(Number.isFinite)) throw Error(`${name} is not finite`);
    return [name, [...array].map(Number)];
  });
  if (at !== payload.length) throw Error(`${payload.length} bytes instead of ${at}`);
  return Object.fromEntries(arrays);
}

// The random stream of an address (Philox 4x64-10), and what is drawn from it.
const LOW = 2n ** 64n - 1n;
function uniforms([seed, robot, episode, step], n) {
  const words = [];
  for (let block = 1n; words.length < n; block++) {
    let c = [block, step, episode, robot].map(BigInt), k = [BigInt(seed), 2n];
    for (let round = 0; round < 10; round++) {
      const a = 0xd2e7470ee14c6c93n * c[0], b = 0xca5a826395121157n * c[2];
      c = [(b >> 64n) ^ c[1] ^ k[0], b & LOW, (a >> 64n) ^ c[3] ^ k[1], a & LOW];
      k = [(k[0] + 0x9e3779b97f4a7c15n) & LOW, (k[1] + 0xbb67ae8584caa73bn) & LOW];
    }
    words.push(...c);
  }
  return words.slice(0, n).map((word) => Number(word >> 11n) / 2 ** 53);
}
const draw = (weights, u) => weights.findIndex((_, i) => sum(weights.slice(0, i + 1)) > u * sum(weights));
function softmax(logits, temperature) {
  const x = logits.map((l) => l / temperature), e = x.map((v) => Math.exp(v - Math.max(...x)));
  return e.map((v) => v / sum(e));
}

// A connection with one request at a time.
const [url, tokenizer] = process.argv.slice(2), socket = new WebSocket(`${url}/v4/stream`);
socket.binaryType = "arraybuffer";
function next() {
  return new Promise((resolve, reject) => {
    socket.onclose = ({ code, reason }) => reject(Error(`closed with ${code}: ${reason}`));
    socket.onmessage = ({ data }) => {
      const message = unpack(Buffer.from(data));
      message[0] === "error" ? reject(Error(`${message[2]}: ${message[3]}`)) : resolve(message);
    };
  });
}
await new Promise((resolve) => { socket.onopen = resolve; });
socket.send(pack(["hello", 4, "node", null, {}, 20, 60000]));
const [, , , , , , , spec, kinds] = await next();
let id = 0;
async function ask(kind, address, window, arrays = {}) {
  const [request, reply] = kinds[kind];
  socket.send(pack([kind, ++id, 60000, address, window, join(request, arrays)]));
  const message = await next();
  if (message[1] !== id) throw Error("a reply to another request");
  return split(reply, message[6]);
}

// The tokenizer's table: safetensors have the length of a JSON head, the head, and the numbers.
const { codebooks: G, codes: K, chunk: n, actions: A, temperature } = spec;
const file = readFileSync(tokenizer), start = 8 + Number(file.readBigUInt64LE());
const [from, to] = JSON.parse(file.subarray(8, start)).table.data_offsets;
const table = new Float32Array(new Uint8Array(file.subarray(start + from, start + to)).buffer);

// Codes that a made-up draft draws, verified by the server and here.
const seen = sum(Object.values(spec.observation.fields).map((f) => product(f.shape) * Math.max(1, f.history)));
const equal = { codes: 0, chunks: 0, accepted: 0 };
for (let step = 0; step < 100; step++) {
  const address = [7, 1, 2, step], window = bytes(Float32Array.from({ length: seen }, (_, i) => Math.sin(i + step)));
  const { logits, offsets } = await ask("infer", address, window);
  const p = Array.from({ length: G }, (_, g) => softmax(logits.slice(g * K, g * K + K), temperature));
  const q = p.map((row) => row.map((v) => (v + 1 / K) / 2));
  const drafted = q.map((row, g) => draw(row, uniforms([8, 1, 2, step], G)[g])), random = uniforms(address, 2 * G);
  const draft = { draft_probs: Float64Array.from(q.flat()), codes: BigInt64Array.from(drafted, BigInt) };
  const verdict = await ask("verify", address, window, draft);

  const kept = drafted.map((z, g) => random[g] >= 1 - Math.min(1, p[g][z] / q[g][z]));
  const drawn = (g) => draw(p[g].map((v, k) => Math.max(v - q[g][k], 0)), random[G + g]);
  const codes = drafted.map((z, g) => (kept[g] ? z : drawn(g)));
  const row = codes.reduce((number, z) => number * K + z, 0) * n * A;
  const added = (i) => (x, z, g) => Math.fround(x + offsets[(g * K + z) * n * A + i]);
  const chunk = Array.from(table.slice(row, row + n * A), (v, i) => codes.reduce(added(i), v));
  equal.codes += `${codes}` === `${verdict.codes}`;
  equal.chunks += `${chunk}` === `${verdict.chunk}`;
  equal.accepted += sum(kept.map(Number));
}
console.log(JSON.stringify(equal));
socket.close();
