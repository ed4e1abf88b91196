//! Making a kubelet's requests acceptable to a Rust server.
//!
//! A kubelet that finds a plugin in `plugins_registry` names the path of the socket as the request's `:authority`
//! (`%2Fvar%2Flib…`). The HTTP/2 library under tonic takes only what could be a host name, and answers with a protocol
//! error. [`AuthorityFilter`] stands in between: it passes everything the client sends on as it is, but for the
//! authority, which becomes `localhost`.

#[cfg(test)]
mod tests;

use loona_hpack::Decoder;

/// What every HTTP/2 client sends first.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Length, type, flags and stream of a frame.
const FRAME_HEADER: usize = 9;

/// No frame may be larger unless the server allows it, and ours does not.
const LARGEST_PAYLOAD: usize = 16_384;

/// All header fields of one request together; gRPC ones take a few hundred bytes.
const LARGEST_HEADERS: usize = 65_536;

const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// Rewrites one connection's bytes on their way from the client to the server.
pub struct AuthorityFilter {
    /// Bytes of a frame (or of the preface) that is not complete yet.
    partial: Vec<u8>,
    preface_seen: bool,
    /// Header fields may refer to those of earlier requests, so every one has to be read.
    decoder: Decoder<'static>,
    /// A request's header fields that go on in the next frame.
    open: Option<OpenHeaders>,
}

/// The connection does not speak HTTP/2 as it should, and has to be closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthorityError {
    /// It begins with something else.
    #[error("the client does not speak HTTP/2")]
    Preface,
    /// Larger than the server allows.
    #[error("a frame of {0} bytes is too large")]
    FrameSize(usize),
    /// Header fields that would not fit into one frame.
    #[error("header fields of {0} bytes are too large")]
    HeadersSize(usize),
    /// A frame that does not belong there, or is cut short.
    #[error("a frame of type {0} is malformed or out of place")]
    Frame(u8),
    /// Header fields that cannot be read.
    #[error("header fields cannot be read: {0}")]
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
    /// Takes what the client sent next and gives what the server is to read; nothing while a frame is incomplete.
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
        if open.block.len() > LARGEST_HEADERS {
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
            // A literal that neither side remembers: no state to keep in step with the server.
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
    /// With its header.
    whole: &'a [u8],
}

/// The first frame of `bytes` and what follows it, once it is complete.
fn next_frame(bytes: &[u8]) -> Result<Option<(Frame<'_>, &[u8])>, AuthorityError> {
    let Some(&[a, b, c, kind, flags, s1, s2, s3, s4]) = bytes.first_chunk::<FRAME_HEADER>() else {
        return Ok(None);
    };
    let length = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
    if length > LARGEST_PAYLOAD {
        return Err(AuthorityError::FrameSize(length));
    }
    let Some((whole, after)) = bytes.split_at_checked(FRAME_HEADER + length) else {
        return Ok(None);
    };
    let payload = &whole[FRAME_HEADER..];
    Ok(Some((Frame { kind, flags, stream: [s1, s2, s3, s4], payload, whole }, after)))
}

/// The header fields in a HEADERS frame, without padding and priority.
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
    let length = u32::try_from(size).ok().filter(|_| size <= LARGEST_PAYLOAD);
    let [_, high, middle, low] = length.ok_or(AuthorityError::HeadersSize(size))?.to_be_bytes();
    out.extend_from_slice(&[high, middle, low, HEADERS, headers.flags | END_HEADERS]);
    out.extend_from_slice(&headers.stream);
    out.extend_from_slice(&headers.block);
    Ok(())
}

/// Length, then the bytes as they are.
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
