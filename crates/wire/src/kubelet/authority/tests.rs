use loona_hpack::Encoder;
use proptest::prelude::*;

use super::*;

const SOCKET: &str = "%2Fvar%2Flib%2Fkubelet%2Fplugins_registry%2Fx.sock";

fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
    let [.., high, low] = payload.len().to_be_bytes();
    let mut bytes = vec![0, high, low, kind, flags, 0, 0, 0, stream];
    bytes.extend_from_slice(payload);
    bytes
}

fn request(encoder: &mut Encoder<'_>, path: &str) -> Vec<u8> {
    let long = "x".repeat(300);
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", SOCKET),
        ("content-type", "application/grpc"),
        ("long", &long),
    ];
    encoder.encode(fields.iter().map(|(name, value)| (name.as_bytes(), value.as_bytes())))
}

/// Returns a preface, settings, two requests and data. The second request refers to header fields
/// of the first.
fn conversation() -> Vec<u8> {
    let mut encoder = Encoder::new();
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(0x4, 0, 0, &[0, 3, 0, 0, 0, 100]));
    let first = request(&mut encoder, "/a");
    let mut padded = vec![3, 0, 0, 0, 0, 16];
    padded.extend_from_slice(&first[..10]);
    padded.extend_from_slice(&[0; 3]);
    bytes.extend(frame(HEADERS, PADDED | PRIORITY, 1, &padded));
    bytes.extend(frame(CONTINUATION, END_HEADERS, 1, &first[10..]));
    bytes.extend(frame(0x0, END_STREAM, 1, b"data"));
    bytes.extend(frame(HEADERS, END_HEADERS | END_STREAM, 3, &request(&mut encoder, "/b")));
    bytes
}

/// Returns the header fields of each request, and the types of all frames.
fn read(mut bytes: &[u8]) -> (Vec<Vec<(String, String)>>, Vec<u8>) {
    let (mut requests, mut kinds, mut decoder) = (Vec::new(), Vec::new(), Decoder::new());
    bytes = bytes.strip_prefix(PREFACE).unwrap();
    while let Some((frame, after)) = next_frame(bytes).unwrap() {
        kinds.push(frame.kind);
        if frame.kind == HEADERS {
            let text = |bytes| String::from_utf8(bytes).unwrap();
            let fields = decoder.decode(frame.payload).unwrap();
            requests.push(fields.into_iter().map(|(name, value)| (text(name), text(value))).collect());
        }
        bytes = after;
    }
    assert!(bytes.is_empty());
    (requests, kinds)
}

#[test]
fn changes_only_the_authority() {
    let out = AuthorityFilter::default().push(&conversation()).unwrap();
    let (requests, kinds) = read(&out);
    assert_eq!(kinds, [0x4, HEADERS, 0x0, HEADERS]);
    for (fields, path) in requests.iter().zip(["/a", "/b"]) {
        let field = |name: &str| fields.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
        assert_eq!(field(":authority"), Some("localhost"));
        assert_eq!(field(":path"), Some(path));
        assert_eq!(field("content-type"), Some("application/grpc"));
        assert_eq!(field("long").map(str::len), Some(300));
        assert_eq!(fields.len(), 6);
    }
}

#[test]
fn rejects_bytes_that_are_not_http2() {
    let mut filter = AuthorityFilter::default();
    assert_eq!(filter.push(b"GET / HTTP/1.1\r\n"), Err(AuthorityError::Preface));
    let mut filter = AuthorityFilter::default();
    filter.push(PREFACE).unwrap();
    assert_eq!(filter.push(&[255; 9]), Err(AuthorityError::FrameSize(0xff_ffff)));
    let mut filter = AuthorityFilter::default();
    filter.push(PREFACE).unwrap();
    assert_eq!(
        filter.push(&frame(CONTINUATION, END_HEADERS, 1, &[])),
        Err(AuthorityError::Frame(CONTINUATION))
    );
}

proptest! {
    #[test]
    fn output_does_not_depend_on_how_the_bytes_are_split(cuts in prop::collection::vec(0..900_usize, 0..20)) {
        let input = conversation();
        let whole = AuthorityFilter::default().push(&input).unwrap();
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(input.len())).collect();
        cuts.sort_unstable();
        cuts.push(input.len());
        let (mut filter, mut start, mut out) = (AuthorityFilter::default(), 0, Vec::new());
        for cut in cuts {
            out.extend(filter.push(&input[start..cut]).unwrap());
            start = cut;
        }
        prop_assert_eq!(out, whole);
    }

    #[test]
    fn never_panics(garbage in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut filter = AuthorityFilter::default();
        filter.push(PREFACE).unwrap();
        let mut headers = frame(HEADERS, END_HEADERS, 1, &garbage);
        headers.extend_from_slice(&garbage);
        let _result = filter.push(&headers);
    }
}
