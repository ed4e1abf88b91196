//! Watches of pods in protobuf. The API server encodes each change of a pod once for all watches of one encoding.
//! kube-scheduler and the kubelets watch in protobuf, so a watch in JSON costs the API server one more encoding, and an
//! expensive one. The client library reads JSON only: a client for watches asks for protobuf, and converts the answer to
//! JSON with the fields that Tessera reads. An API server that answers in JSON is understood as well.

mod schema;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::{Buf as _, Bytes, BytesMut};
use futures::{StreamExt as _, TryStreamExt as _, stream};
use http::{HeaderValue, Request, Response, header};
use http_body::Frame;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, StreamBody};
use kube::Client;
use prost::Message as _;
use serde::Serialize;
use tower::BoxError;

/// Encodings that a watch of pods accepts, the preferred one first.
const ACCEPTED: HeaderValue =
    HeaderValue::from_static("application/vnd.kubernetes.protobuf;stream=watch, application/json");

/// Media type of answers in protobuf.
const PROTOBUF: &str = "application/vnd.kubernetes.protobuf";

/// Prefix of objects in protobuf.
const MAGIC: &[u8] = b"k8s\0";

/// Largest event. etcd stores objects of at most 1.5 MiB.
const MAX_EVENT_BYTES: usize = 16 << 20;

/// An answer in protobuf that cannot be converted. The watch reconnects.
#[derive(Debug, thiserror::Error)]
enum ProtobufError {
    #[error("an event of {0} bytes in a watch is larger than any object")]
    TooLarge(usize),
    #[error("an event of a watch is not in the protobuf encoding of Kubernetes")]
    Decode(#[from] prost::DecodeError),
    #[error("the object of an event of a watch has no prefix of protobuf objects")]
    Prefix,
    #[error("a watch of pods sent an object of the kind {0:?}")]
    Kind(String),
    #[error("cannot convert an event of a watch to JSON")]
    Json(#[from] serde_json::Error),
}

/// Returns the client for a watch of pods. After an answer in protobuf that cannot be converted, it asks for JSON: the
/// API server stores whatever a tenant writes in protobuf, also text that is not UTF-8, and would send the same event
/// again and again.
pub(crate) fn watching_pods(client: Client) -> Client {
    let namespace = client.default_namespace().to_owned();
    let unreadable = Arc::new(AtomicBool::new(false));
    let converted = tower::service_fn(move |request| {
        let (client, unreadable) = (client.clone(), Arc::clone(&unreadable));
        async move {
            let request = if unreadable.load(Ordering::Relaxed) { request } else { prefer_protobuf(request) };
            client.send(request).await.map(|answer| to_json(answer, unreadable))
        }
    });
    Client::new(converted, namespace)
}

/// Asks for protobuf if the request is a watch. A list is needed only when a watch begins.
fn prefer_protobuf<B>(mut request: Request<B>) -> Request<B> {
    if request.uri().query().is_some_and(|query| query.split('&').any(|pair| pair == "watch=true")) {
        request.headers_mut().insert(header::ACCEPT, ACCEPTED);
    }
    request
}

/// Converts a watch in protobuf to JSON, and passes on all other answers. Errors come as one object in protobuf, which
/// is not converted. `unreadable` is set if the watch must be repeated in JSON.
fn to_json<B>(answer: Response<B>, unreadable: Arc<AtomicBool>) -> Response<UnsyncBoxBody<Bytes, BoxError>>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let kind = answer.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let is_protobuf = kind.is_some_and(|kind| kind.starts_with(PROTOBUF));
    let is_watch = kind.is_some_and(|kind| kind.contains("stream=watch"));
    if is_protobuf && !is_watch {
        unreadable.store(true, Ordering::Relaxed);
    }
    answer.map(|body| {
        let body = body.map_err(Into::into);
        if is_protobuf && is_watch { converted(body, unreadable).boxed_unsync() } else { body.boxed_unsync() }
    })
}

fn converted<B>(
    body: B,
    unreadable: Arc<AtomicBool>,
) -> impl http_body::Body<Data = Bytes, Error = BoxError> + Send
where
    B: http_body::Body<Data = Bytes, Error = BoxError> + Send + 'static,
{
    let chunks = Box::pin(body.into_data_stream());
    let state = (chunks, BytesMut::new(), unreadable);
    let lines = stream::try_unfold(state, async |(mut chunks, mut buffer, unreadable)| {
        loop {
            let lines = take_lines(&mut buffer).inspect_err(|error| {
                tracing::warn!(%error, "cannot read a pod in protobuf; watching pods in JSON from now on");
                unreadable.store(true, Ordering::Relaxed);
            })?;
            if !lines.is_empty() {
                return Ok(Some((Bytes::from(lines), (chunks, buffer, unreadable))));
            }
            match chunks.next().await {
                Some(chunk) => buffer.extend_from_slice(&chunk?),
                None => return Ok::<_, BoxError>(None),
            }
        }
    });
    StreamBody::new(lines.map_ok(Frame::data))
}

/// Removes all complete events from the buffer and returns them as lines of JSON.
fn take_lines(buffer: &mut BytesMut) -> Result<Vec<u8>, ProtobufError> {
    let mut lines = Vec::new();
    while let Some((head, rest)) = buffer.split_first_chunk() {
        let length = usize::try_from(u32::from_be_bytes(*head)).unwrap_or(usize::MAX);
        if length > MAX_EVENT_BYTES {
            return Err(ProtobufError::TooLarge(length));
        }
        if rest.len() < length {
            break;
        }
        buffer.advance(head_bytes());
        write_event(buffer.split_to(length).freeze(), &mut lines)?;
    }
    Ok(lines)
}

const fn head_bytes() -> usize {
    size_of::<u32>()
}

fn write_event(event: Bytes, lines: &mut Vec<u8>) -> Result<(), ProtobufError> {
    let event = schema::WatchEvent::decode(event)?;
    let raw = event.object.unwrap_or_default().raw;
    let object = raw.strip_prefix(MAGIC).map(|body| raw.slice_ref(body)).ok_or(ProtobufError::Prefix)?;
    let schema::Unknown { type_meta, raw } = schema::Unknown::decode(object)?;
    let kind = type_meta.unwrap_or_default().kind;
    match kind.as_str() {
        "Pod" => write_line(lines, &event.kind, &kind, schema::Pod::decode(raw)?),
        "Status" => write_line(lines, &event.kind, &kind, schema::Status::decode(raw)?),
        _ => Err(ProtobufError::Kind(kind)),
    }
}

/// Appends an event as a line of JSON.
fn write_line(
    lines: &mut Vec<u8>,
    event: &str,
    kind: &str,
    fields: impl Serialize,
) -> Result<(), ProtobufError> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Object<'a, T> {
        api_version: &'static str,
        kind: &'a str,
        #[serde(flatten)]
        fields: T,
    }
    #[derive(Serialize)]
    struct Event<'a, T> {
        #[serde(rename = "type")]
        kind: &'a str,
        object: Object<'a, T>,
    }
    let object = Object { api_version: "v1", kind, fields };
    serde_json::to_writer(&mut *lines, &Event { kind: event, object })?;
    lines.push(b'\n');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LeanPod;

    /// Returns an event with an object of this kind as a frame.
    fn frame(event: &str, kind: &str, fields: &[u8]) -> Vec<u8> {
        let type_meta = Some(schema::TypeMeta { kind: kind.to_owned() });
        let unknown = schema::Unknown { type_meta, raw: Bytes::copy_from_slice(fields) };
        let raw = [MAGIC, &unknown.encode_to_vec()].concat().into();
        let object = Some(schema::RawExtension { raw });
        let event = schema::WatchEvent { kind: event.to_owned(), object }.encode_to_vec();
        [&u32::try_from(event.len()).unwrap().to_be_bytes()[..], &event].concat()
    }

    /// Encodes a field with a length, such as a text or a message.
    fn field(number: u8, contents: &[u8]) -> Vec<u8> {
        let key = u32::from(number) << 3 | 2;
        let mut bytes = Vec::new();
        prost::encoding::encode_varint(key.into(), &mut bytes);
        prost::encoding::encode_varint(u64::try_from(contents.len()).unwrap(), &mut bytes);
        [bytes, contents.to_vec()].concat()
    }

    fn number(number: u8, value: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        prost::encoding::encode_varint((u32::from(number) << 3).into(), &mut bytes);
        prost::encoding::encode_varint(value, &mut bytes);
        bytes
    }

    fn entry(number: u8, key: &str, value: &[u8]) -> Vec<u8> {
        field(number, &[field(1, key.as_bytes()), field(2, value)].concat())
    }

    /// A pod with a value in every field that is read, and with fields that are not.
    fn pod() -> Vec<u8> {
        let quantity = |amount: &str| field(1, amount.as_bytes());
        let used = [field(1, b"gpu"), field(2, b"small")].concat();
        let resources =
            [entry(1, "nvidia.com/gpu", &quantity("2")), entry(2, "cpu", &quantity("500m")), field(3, &used)]
                .concat();
        let variable = |name: &str| field(7, &[field(1, name.as_bytes()), field(2, b"jane")].concat());
        let container = |name: &str, policy: &str| {
            [
                field(1, name.as_bytes()),
                field(2, b"image"),
                field(6, &[number(2, 8080), number(3, 80), field(4, b"UDP"), field(5, b"10.0.0.1")].concat()),
                variable("HOME"),
                variable("SUBMITTER"),
                field(8, &resources),
                field(24, policy.as_bytes()),
            ]
            .concat()
        };
        let status = |id: &str| {
            [field(1, b"main"), field(3, &field(3, &field(7, b"old"))), field(8, id.as_bytes())].concat()
        };
        let metadata = [
            field(1, b"p"),
            field(3, b"team"),
            field(5, b"uid"),
            field(6, b"42"),
            field(9, &number(1, 1_800_000_000)),
            entry(11, "app", b"a"),
            entry(12, "tessera.dev/policy", b"link"),
            field(17, b"managed"),
        ];
        let toleration = [field(1, b"k"), field(2, b"Exists"), field(4, b"PreferNoSchedule")].concat();
        let expression = [field(1, b"disk"), field(2, b"In"), field(3, b"ssd"), field(3, b"nvme")].concat();
        let term = field(1, &[field(1, &expression), field(2, &field(1, b"metadata.name"))].concat());
        let app = [field(1, b"app"), field(2, b"Exists")].concat();
        let excluded = [
            field(1, &[entry(1, "team", b"a"), field(2, &app)].concat()),
            field(2, b"other"),
            field(3, b"zone"),
        ]
        .concat();
        let by_namespace =
            [field(1, b""), field(4, &entry(1, "team", b"a")), field(5, b"hash"), field(6, b"tenant")]
                .concat();
        let excluded = [field(1, &excluded), field(1, &by_namespace), field(2, b"term")].concat();
        let spec = [
            field(1, &[field(1, b"data"), field(2, &field(10, &field(1, b"claim")))].concat()),
            field(2, &container("main", "")),
            entry(7, "zone", b"a"),
            field(10, b"node"),
            field(18, &[field(1, &field(1, &term)), field(3, &excluded)].concat()),
            field(19, b"tessera"),
            field(20, &container("side", "Always")),
            field(22, &toleration),
            number(25, 7),
            entry(32, "memory", &quantity("1Gi")),
            field(33, &field(3, b"ScheduleAnyway")),
            field(39, &[field(1, b"gpu"), field(4, b"template")].concat()),
        ];
        let unscheduled = [
            field(1, b"PodScheduled"),
            field(2, b"False"),
            field(4, &number(1, 1_700_000_000)),
            field(5, b"Unschedulable"),
            field(6, b"0/3 nodes are available"),
        ]
        .concat();
        let observed = [
            field(1, b"Running"),
            field(2, &unscheduled),
            field(3, b"why"),
            field(7, &number(1, 1_700_000_000)),
            field(8, &status("containerd://a")),
            field(10, &status("containerd://b")),
            field(13, &status("containerd://c")),
            field(15, &[field(1, b"gpu"), field(2, b"p-gpu-1")].concat()),
            field(
                18,
                &[
                    field(
                        1,
                        &[field(1, b"main"), field(2, b"nvidia.com/gpu"), field(3, b"request-0")].concat(),
                    ),
                    field(2, b"p-extended-1"),
                ]
                .concat(),
            ),
        ];
        [field(1, &metadata.concat()), field(2, &spec.concat()), field(3, &observed.concat())].concat()
    }

    #[test]
    fn a_pod_in_protobuf_is_the_pod_in_json() {
        let container = |name: &str, more: &str| {
            format!(
                r#"{{"name":"{name}","image":"image"{more},"ports":[{{"hostPort":8080,"containerPort":80,"protocol":"UDP","hostIP":"10.0.0.1"}}],"env":[{{"name":"SUBMITTER","value":"jane"}}],
                   "resources":{{"limits":{{"nvidia.com/gpu":"2"}},"requests":{{"cpu":"500m"}},
                   "claims":[{{"name":"gpu","request":"small"}}]}}}}"#
            )
        };
        let status = |id: &str| {
            format!(
                r#"[{{"name":"main","containerID":"containerd://{id}","lastState":{{"terminated":{{"containerID":"old"}}}}}}]"#
            )
        };
        let json = format!(
            r#"{{"metadata":{{"name":"p","namespace":"team","uid":"uid","resourceVersion":"42","labels":{{"app":"a"}},
               "annotations":{{"tessera.dev/policy":"link"}},"deletionTimestamp":"2027-01-15T08:00:00Z"}},
               "spec":{{"containers":[{}],"nodeName":"node","schedulerName":"tessera","initContainers":[{}],
               "volumes":[{{"name":"data","persistentVolumeClaim":{{"claimName":"claim"}}}}],"nodeSelector":{{"zone":"a"}},
               "affinity":{{"nodeAffinity":{{"requiredDuringSchedulingIgnoredDuringExecution":{{"nodeSelectorTerms":[
               {{"matchExpressions":[{{"key":"disk","operator":"In","values":["ssd","nvme"]}}],
               "matchFields":[{{"key":"metadata.name"}}]}}]}}}},
               "podAntiAffinity":{{"requiredDuringSchedulingIgnoredDuringExecution":[{{"labelSelector":{{
               "matchLabels":{{"team":"a"}},"matchExpressions":[{{"key":"app","operator":"Exists"}}]}},
               "namespaces":["other"],"topologyKey":"zone"}},{{"labelSelector":{{}},"topologyKey":"",
               "namespaceSelector":{{"matchLabels":{{"team":"a"}}}},"matchLabelKeys":["hash"],"mismatchLabelKeys":["tenant"]}}],
               "preferredDuringSchedulingIgnoredDuringExecution":[{{}}]}}}},
               "tolerations":[{{"key":"k","operator":"Exists","effect":"PreferNoSchedule"}}],"priority":7,
               "overhead":{{"memory":"1Gi"}},"topologySpreadConstraints":[{{"whenUnsatisfiable":"ScheduleAnyway"}}],
               "resourceClaims":[{{"name":"gpu","resourceClaimTemplateName":"template"}}]}},
               "status":{{"phase":"Running","message":"why","conditions":[{{"type":"PodScheduled","status":"False",
               "lastTransitionTime":"2023-11-14T22:13:20Z","reason":"Unschedulable","message":"0/3 nodes are available"}}],
               "startTime":"2023-11-14T22:13:20Z","containerStatuses":{},
               "initContainerStatuses":{},"ephemeralContainerStatuses":{},
               "resourceClaimStatuses":[{{"name":"gpu","resourceClaimName":"p-gpu-1"}}],
               "extendedResourceClaimStatus":{{"resourceClaimName":"p-extended-1","requestMappings":[
               {{"containerName":"main","resourceName":"nvidia.com/gpu","requestName":"request-0"}}]}}}}}}"#,
            container("main", ""),
            container("side", r#","restartPolicy":"Always""#),
            status("a"),
            status("b"),
            status("c")
        );
        let expected: LeanPod = serde_json::from_str(&json).unwrap();
        let affinity = &expected.spec.affinity;
        assert!(affinity.has_preferred && affinity.excluded.len() == 1 && affinity.excludes_more);
        assert_eq!(expected.spec.containers[0].ports.len(), 1);
        assert!(expected.spec.spreading.has_preferred && expected.spec.has_bound_volumes);
        let mut buffer = BytesMut::from(&frame("MODIFIED", "Pod", &pod())[..]);
        let line: serde_json::Value = serde_json::from_slice(&take_lines(&mut buffer).unwrap()).unwrap();
        assert_eq!(line["type"], "MODIFIED");
        assert_eq!(serde_json::from_value::<LeanPod>(line["object"].clone()).unwrap(), expected);
    }

    #[tokio::test]
    async fn events_are_found_in_chunks_of_any_size() {
        let gone = [field(2, b"Failure"), field(4, b"Expired"), number(6, 410)].concat();
        let all = [frame("ADDED", "Pod", &pod()), frame("ERROR", "Status", &gone)].concat();
        for size in [1, 3, 50, all.len()] {
            let chunks: Vec<_> = all
                .chunks(size)
                .map(|chunk| Ok::<_, BoxError>(Frame::data(Bytes::copy_from_slice(chunk))))
                .collect();
            let body = StreamBody::new(stream::iter(chunks));
            let answer = Response::builder()
                .header(header::CONTENT_TYPE, "application/vnd.kubernetes.protobuf;stream=watch");
            let unreadable = Arc::new(AtomicBool::new(false));
            let answer = to_json(answer.body(body).unwrap(), Arc::clone(&unreadable));
            assert!(!unreadable.load(Ordering::Relaxed));
            let text = answer.into_body().collect().await.unwrap().to_bytes();
            let lines: Vec<serde_json::Value> = text
                .split_inclusive(|byte| *byte == b'\n')
                .map(|line| serde_json::from_slice(line).unwrap())
                .collect();
            assert_eq!(lines.len(), 2);
            assert_eq!((&lines[1]["type"], &lines[1]["object"]["code"]), (&"ERROR".into(), &410.into()));
        }
    }

    /// A tenant can store text that is not UTF-8.
    #[tokio::test]
    async fn a_watch_that_cannot_be_read_is_repeated_in_json() {
        let bad = field(1, &entry(12, "a", b"\xff\xfe"));
        for (kind, body) in [
            ("application/vnd.kubernetes.protobuf;stream=watch", frame("ADDED", "Pod", &bad)),
            ("application/vnd.kubernetes.protobuf", b"k8s\0".to_vec()),
        ] {
            let unreadable = Arc::new(AtomicBool::new(false));
            let body = StreamBody::new(stream::iter([Ok::<_, BoxError>(Frame::data(Bytes::from(body)))]));
            let answer = Response::builder().header(header::CONTENT_TYPE, kind).body(body).unwrap();
            let _ = to_json(answer, Arc::clone(&unreadable)).into_body().collect().await;
            assert!(unreadable.load(Ordering::Relaxed), "{kind}");
        }
    }

    #[test]
    fn bad_events_are_errors() {
        let lines = |bytes: &[u8]| take_lines(&mut BytesMut::from(bytes));
        assert!(matches!(lines(&u32::MAX.to_be_bytes()), Err(ProtobufError::TooLarge(_))));
        assert!(matches!(lines(&[0, 0, 0, 1, 0xff]), Err(ProtobufError::Decode(_))));
        assert!(matches!(lines(&[0, 0, 0, 0]), Err(ProtobufError::Prefix)));
        assert!(matches!(lines(&frame("ADDED", "Node", b"")), Err(ProtobufError::Kind(_))));
        assert!(lines(&frame("ADDED", "Pod", &pod())[..9]).unwrap().is_empty(), "the rest arrives later");
    }

    #[test]
    fn only_watches_ask_for_protobuf() {
        let asks = |uri: &str| {
            let request = prefer_protobuf(Request::get(uri).body(()).unwrap());
            request.headers().get(header::ACCEPT) == Some(&ACCEPTED)
        };
        assert!(asks("/api/v1/pods?&watch=true&timeoutSeconds=60"));
        for other in ["/api/v1/pods?limit=1", "/api/v1/pods", "/api/v1/pods?watch=false"] {
            assert!(!asks(other), "{other}");
        }
    }
}
