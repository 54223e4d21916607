// Numbers, times and sizes as people read them. `null` is what was not measured, and looks like it.

export const NOTHING = "–";

/** A rate or a count with three significant digits: 0.25, 12.3, 1,240. */
export function number(value) {
  if (value == null) return NOTHING;
  if (Number.isInteger(value) || value >= 100) return Math.round(value).toLocaleString("en");
  return value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

/** Seconds as µs, ms or s. */
export function duration(seconds) {
  if (seconds == null) return NOTHING;
  if (seconds === 0) return "0";
  if (seconds >= 100) return `${Math.round(seconds)} s`;
  if (seconds >= 1) return `${seconds.toFixed(2)} s`;
  if (seconds >= 0.1) return `${Math.round(seconds * 1e3)} ms`;
  return seconds >= 0.001 ? `${(seconds * 1e3).toFixed(1)} ms` : `${Math.round(seconds * 1e6)} µs`;
}

/** Unix seconds as a local time of day. */
export function clock(unixSeconds) {
  const date = new Date(unixSeconds * 1e3);
  const two = (value) => String(value).padStart(2, "0");
  return `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

export function percent(share) {
  return share == null ? NOTHING : `${Math.round(share * 100)} %`;
}

export function megabytes(bytes) {
  return bytes ? `${Math.round(bytes / 1e6)} MB` : NOTHING;
}

/** The beginning of a long id; the whole one is in the title. */
export function shortId(id) {
  return id.length > 22 ? `${id.slice(0, 21)}…` : id;
}
