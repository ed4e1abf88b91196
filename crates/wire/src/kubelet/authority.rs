//! Rewrites the `:authority` of a kubelet's requests, so that a Rust server accepts them.
//!
//! A kubelet that finds a plugin in `plugins_registry` sends the path of the socket as the
//! request's `:authority` (`%2Fvar%2Flib…`). The HTTP/2 library under tonic accepts only host names
//! and answers with a protocol error. [`AuthorityFilter`] sits between both: it forwards the
//! client's bytes unchanged, except for the authority, which it replaces with `localhost`.

#[cfg(test)]
mod tests;

use loona_hpack::Decoder;

/// Connection preface, which every HTTP/2 client sends first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Size in bytes of a frame's length, type, flags and stream.
const FRAME_HEADER_BYTES: usize = 9;

/// Largest payload of a frame: the default of HTTP/2, which our server does not raise.
const MAX_PAYLOAD_BYTES: usize = 16_384;

/// Largest size of all header fields of one request. Those of gRPC take a few hundred bytes.
const MAX_HEADERS_BYTES: usize = 65_536;

const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Rewrites the bytes of one connection on their way from the client to the server.
pub struct AuthorityFilter {
    /// Bytes of an incomplete frame, or of the incomplete preface.
    partial: Vec<u8>,
    preface_seen: bool,
    /// HPACK decoder. Header fields may refer to earlier requests, so it decodes every request.
    decoder: Decoder<'static>,
    /// Header fields of a request that continue in the next frame.
    open: Option<OpenHeaders>,
}

/// A violation of HTTP/2. The caller must close the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// The connection does not begin with the preface.
    #[error("the client does not speak HTTP/2")]
    Preface,
    /// A frame is larger than the server allows.
    #[error("a frame of {0} bytes is too large")]
    FrameSize(usize),
    /// The header fields do not fit into one frame.
    #[error("header fields of {0} bytes are too large")]
    HeadersSize(usize),
    /// A frame is out of place or truncated.
    #[error("a frame of type {0} is malformed or out of place")]
    Frame(u8),
    /// The header fields cannot be decoded.
    #[error("header fields cannot be decoded: {0}")]
    Compression(String),
}

struct OpenHeaders {
    stream: [u8; 4],
    flags: u8,
    block: Vec<u8>,
}

impl std::fmt::Debug for AuthorityFilter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AuthorityFilter").field("pending", &self.partial.len()).finish_non_exhaustive()
    }
}

impl Default for AuthorityFilter {
    fn default() -> Self {
        Self { partial: Vec::new(), preface_seen: false, decoder: Decoder::new(), open: None }
    }
}

impl AuthorityFilter {
    /// Takes the next bytes of the client and returns the bytes for the server. Returns no bytes
    /// while a frame is incomplete.
    pub fn push(&mut self, received: &[u8]) -> Result<Vec<u8>, AuthorityError> {
        self.partial.extend_from_slice(received);
        let mut out = Vec::with_capacity(self.partial.len());
        let input = std::mem::take(&mut self.partial);
        let mut rest = input.as_slice();
        if !self.preface_seen {
            let length = rest.len().min(PREFACE.len());
            if rest[..length] != PREFACE[..length] {
                return Err(AuthorityError::Preface);
            }
            if length == PREFACE.len() {
                self.preface_seen = true;
                out.extend_from_slice(PREFACE);
                rest = &rest[length..];
            }
        }
        while self.preface_seen
            && let Some((frame, after)) = next_frame(rest)?
        {
            self.pass(frame, &mut out)?;
            rest = after;
        }
        self.partial = rest.to_vec();
        Ok(out)
    }

    fn pass(&mut self, frame: Frame<'_>, out: &mut Vec<u8>) -> Result<(), AuthorityError> {
        let mut open = match (frame.kind, self.open.take()) {
            (HEADERS, None) => {
                let block = fragment(&frame).ok_or(AuthorityError::Frame(HEADERS))?.to_vec();
                OpenHeaders { stream: frame.stream, flags: frame.flags & END_STREAM, block }
            }
            (CONTINUATION, Some(mut open)) if open.stream == frame.stream => {
                open.block.extend_from_slice(frame.payload);
                open
            }
            (HEADERS | CONTINUATION, _) | (_, Some(_)) => return Err(AuthorityError::Frame(frame.kind)),
            (_, None) => {
                out.extend_from_slice(frame.whole);
                return Ok(());
            }
        };
        if open.block.len() > MAX_HEADERS_BYTES {
            return Err(AuthorityError::HeadersSize(open.block.len()));
        }
        if frame.flags & END_HEADERS == 0 {
            self.open = Some(open);
            return Ok(());
        }
        open.block = self.rewrite(&open.block)?;
        write_headers(&open, out)
    }

    fn rewrite(&mut self, block: &[u8]) -> Result<Vec<u8>, AuthorityError> {
        let fields =
            self.decoder.decode(block).map_err(|error| AuthorityError::Compression(format!("{error:?}")))?;
        let mut rewritten = Vec::with_capacity(block.len() + 64);
        for (name, value) in fields {
            let value = if name == b":authority" { b"localhost".to_vec() } else { value };
            // A literal without indexing adds no state that must match the server's decoder.
            rewritten.push(0);
            write_string(&name, &mut rewritten);
            write_string(&value, &mut rewritten);
        }
        Ok(rewritten)
    }
}

struct Frame<'a> {
    kind: u8,
    flags: u8,
    stream: [u8; 4],
    payload: &'a [u8],
    /// Frame header and payload.
    whole: &'a [u8],
}

/// Splits the first frame off `bytes`. Returns `None` while it is incomplete.
fn next_frame(bytes: &[u8]) -> Result<Option<(Frame<'_>, &[u8])>, AuthorityError> {
    let Some(&[a, b, c, kind, flags, s1, s2, s3, s4]) = bytes.first_chunk::<FRAME_HEADER_BYTES>() else {
        return Ok(None);
    };
    let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
    if length > MAX_PAYLOAD_BYTES {
        return Err(AuthorityError::FrameSize(length));
    }
    let Some((whole, after)) = bytes.split_at_checked(FRAME_HEADER_BYTES + length) else {
        return Ok(None);
    };
    let payload = &whole[FRAME_HEADER_BYTES..];
    Ok(Some((Frame { kind, flags, stream: [s1, s2, s3, s4], payload, whole }, after)))
}

/// Returns the header block of a HEADERS frame, without padding and priority.
fn fragment<'a>(frame: &Frame<'a>) -> Option<&'a [u8]> {
    let mut payload = frame.payload;
    if frame.flags & PADDED != 0 {
        let (&padding, rest) = payload.split_first()?;
        payload = rest.get(..rest.len().checked_sub(usize::from(padding))?)?;
    }
    if frame.flags & PRIORITY != 0 { payload.get(5..) } else { Some(payload) }
}

fn write_headers(headers: &OpenHeaders, out: &mut Vec<u8>) -> Result<(), AuthorityError> {
    let size = headers.block.len();
    let length = u32::try_from(size).ok().filter(|_| size <= MAX_PAYLOAD_BYTES);
    let [_, high, middle, low] = length.ok_or(AuthorityError::HeadersSize(size))?.to_be_bytes();
    out.extend_from_slice(&[high, middle, low, HEADERS, headers.flags | END_HEADERS]);
    out.extend_from_slice(&headers.stream);
    out.extend_from_slice(&headers.block);
    Ok(())
}

/// Writes an HPACK string without Huffman coding: its length, then its bytes.
fn write_string(string: &[u8], out: &mut Vec<u8>) {
    let mut length = string.len();
    if length < 127 {
        out.extend(u8::try_from(length));
    } else {
        out.push(127);
        length -= 127;
        while length >= 128 {
            out.extend(u8::try_from(length % 128 + 128));
            length /= 128;
        }
        out.extend(u8::try_from(length));
    }
    out.extend_from_slice(string);
}
