// Who signed an archive: OpenSSH's signature format (PROTOCOL.sshsig) over SHA256SUMS, checked by WebCrypto.
// Ed25519, ECDSA on the NIST curves and RSA from 2048 bits; no keys in hardware (sk-), no certificates.
const NAMESPACE = 'mlbench-archive';
const CURVES = {
  'ecdsa-sha2-nistp256': { namedCurve: 'P-256', size: 32, hash: 'SHA-256' },
  'ecdsa-sha2-nistp384': { namedCurve: 'P-384', size: 48, hash: 'SHA-384' },
  'ecdsa-sha2-nistp521': { namedCurve: 'P-521', size: 66, hash: 'SHA-512' },
};
const HASHES = { sha256: 'SHA-256', sha512: 'SHA-512' };
const decode = data => new TextDecoder('utf-8', { fatal: true }).decode(data);
const encode = text => new TextEncoder().encode(text);
const fromBase64 = text => Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
const toBase64 = data => btoa(String.fromCharCode(...data));

class Reader {
  #data; #at = 0;
  constructor(data) { this.#data = data; }
  take(count) {
    if (count > this.#data.length - this.#at) throw new Error('the signature ends early');
    return this.#data.subarray(this.#at, this.#at += count);
  }
  number() { const bytes = this.take(4); return new DataView(bytes.buffer, bytes.byteOffset, 4).getUint32(0); }
  field() { return this.take(this.number()); }
  text() { return decode(this.field()); }
  end() { if (this.#at !== this.#data.length) throw new Error('bytes follow the end of the signature'); }
}

function join(...parts) {
  const joined = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let at = 0;
  for (const part of parts) { joined.set(part, at); at += part.length; }
  return joined;
}

function frame(data) {
  const length = new Uint8Array(4);
  new DataView(length.buffer).setUint32(0, data.length);
  return join(length, data);
}

/** A number without leading zeros, and padded to `size` bytes if that is given. */
function integer(data, size) {
  let begin = 0;
  while (begin < data.length - 1 && data[begin] === 0) begin++;
  const bare = data.subarray(begin);
  if (size === undefined) return bare;
  if (bare.length > size) throw new Error('a number of the signature is too long');
  return join(new Uint8Array(size - bare.length), bare);
}

async function isRight(key, signature, message) {
  const publicKey = new Reader(key), type = publicKey.text();
  const made = new Reader(signature), kind = made.text(), raw = made.field();
  made.end();
  const { subtle } = crypto;
  if (type === 'ssh-ed25519' && kind === type) {
    const opened = await subtle.importKey('raw', publicKey.field(), { name: 'Ed25519' }, false, ['verify']);
    return subtle.verify({ name: 'Ed25519' }, opened, raw, message);
  }
  if (type === 'ssh-rsa' && (kind === 'rsa-sha2-256' || kind === 'rsa-sha2-512')) {
    const exponent = integer(publicKey.field()), modulus = integer(publicKey.field());
    if (modulus.length < 256) throw new Error('the RSA key has less than 2048 bits');
    const url = data => toBase64(data).replaceAll('+', '-').replaceAll('/', '_').replace(/=+$/, '');
    const algorithm = { name: 'RSASSA-PKCS1-v1_5', hash: `SHA-${kind.slice(-3)}` };
    const opened = await subtle.importKey('jwk', { kty: 'RSA', e: url(exponent), n: url(modulus) }, algorithm, false, ['verify']);
    return subtle.verify(algorithm, opened, integer(raw, modulus.length), message);
  }
  const curve = CURVES[type];
  if (curve && kind === type) {
    publicKey.field(); // the name of the curve
    const opened = await subtle.importKey('raw', publicKey.field(), { name: 'ECDSA', namedCurve: curve.namedCurve }, false, ['verify']);
    const numbers = new Reader(raw), r = integer(numbers.field(), curve.size), s = integer(numbers.field(), curve.size);
    return subtle.verify({ name: 'ECDSA', hash: curve.hash }, opened, join(r, s), message);
  }
  throw new Error(`this page cannot check a ${kind} signature by a ${type} key; mlbench verify --signers can`);
}

/** The lines of a file of allowed signers (ssh-keygen(1)). */
function readSigners(text) {
  const found = [];
  for (const line of text.split('\n')) {
    if (!line.trim() || line.startsWith('#')) continue;
    const match = /^(\S+)\s+(?:((?:"[^"]*"|\S)*)\s+)??((?:ssh|ecdsa|sk)-\S*)\s+([A-Za-z0-9+/=]+)/.exec(line);
    if (!match || /cert-authority/i.test(match[2] ?? '')) continue;
    const option = name => new RegExp(`(?:^|,)${name}="([^"]*)"`, 'i').exec(match[2] ?? '')?.[1];
    found.push({ principal: match[1], namespaces: option('namespaces')?.split(','), from: option('valid-after'), until: option('valid-before'), key: match[4] });
  }
  return found;
}

function moment(text) {
  const match = /^(\d{4})(\d\d)(\d\d)(?:(\d\d)(\d\d)(\d\d)?)?(Z?)$/.exec(text);
  if (!match) throw new Error(`the list of signers has no time "${text}"`);
  const [year, month, day, hour = 0, minute = 0, second = 0] = match.slice(1, 7).map(part => part === undefined ? undefined : Number(part));
  return match[7] ? Date.UTC(year, month - 1, day, hour, minute, second) : new Date(year, month - 1, day, hour, minute, second).getTime();
}

/** Who of `signers` signed `message`: {principal, fingerprint}. Throws with the reason if nobody is proven to have. */
export async function findSigner(armored, message, signers) {
  const match = /^-----BEGIN SSH SIGNATURE-----\n([A-Za-z0-9+/=\n]+)\n-----END SSH SIGNATURE-----\n$/.exec(armored);
  if (!match) throw new Error('it is not an OpenSSH signature');
  const blob = new Reader(fromBase64(match[1].replaceAll('\n', '')));
  if (decode(blob.take(6)) !== 'SSHSIG' || blob.number() !== 1) throw new Error('it is not an OpenSSH signature');
  const key = blob.field(), namespace = blob.text(), reserved = blob.field(), hash = blob.text(), signature = blob.field();
  blob.end();
  if (namespace !== NAMESPACE) throw new Error('it is a signature for another purpose');
  if (!HASHES[hash]) throw new Error(`this page cannot check signatures with ${hash}`);
  const own = readSigners(signers).filter(line => line.key === toBase64(key));
  if (!own.length) throw new Error("this site's list of signers does not have the key that it was signed with");
  const named = own.filter(line => !line.namespaces || line.namespaces.includes(NAMESPACE));
  if (!named.length) throw new Error("this site's list of signers allows the signer other purposes only");
  const now = Date.now();
  const line = named.find(each => (!each.from || moment(each.from) <= now) && (!each.until || now < moment(each.until)));
  if (!line) throw new Error("this site's list of signers does not allow the key now");
  const digest = new Uint8Array(await crypto.subtle.digest(HASHES[hash], message));
  const signed = join(encode('SSHSIG'), frame(encode(NAMESPACE)), frame(reserved), frame(encode(hash)), frame(digest));
  if (!await isRight(key, signature, signed)) throw new Error('SHA256SUMS is not what was signed');
  const print = toBase64(new Uint8Array(await crypto.subtle.digest('SHA-256', key))).replace(/=+$/, '');
  return { principal: line.principal, fingerprint: `SHA256:${print}` };
}
