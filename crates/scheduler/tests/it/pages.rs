//! The dashboard over HTTP: headers, files, live updates, and the answers of a replica that does
//! not lead.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use axum::body::{Body, BodyDataStream};
use axum::http::Request;
use axum::routing::get;
use axum::{Json, Router};
use futures::StreamExt as _;
use serde_json::{Value, json};
use tessera_scheduler::dashboard::view;
use tokio::net::TcpListener;
use tower::ServiceExt as _;

use crate::fixtures::*;
use crate::server::{Replica, cluster, eventually, make};

fn parse_json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| panic!("no JSON: {text}"))
}

async fn json_at(replica: &Replica, path: &str) -> Value {
    let (code, text) = replica.get(path).await;
    assert_eq!(code, 200, "{path}: {text}");
    parse_json(&text)
}

#[tokio::test]
async fn every_response_has_security_headers_and_the_api_is_read_only() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    for path in ["/", "/assets/app.js", "/api/v1/cluster", "/api/v1/nodes/nobody", "/api/v1/nonsense"] {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let answer = replica.router.clone().oneshot(request).await.unwrap();
        let header =
            |name: &str| answer.headers().get(name).map(|value| value.to_str().unwrap()).unwrap_or_default();
        let policy = header("content-security-policy");
        assert!(
            policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'")
                && !policy.contains("unsafe"),
            "{path}: {policy}"
        );
        assert_eq!(
            (header("x-content-type-options"), header("referrer-policy"), header("x-frame-options")),
            ("nosniff", "no-referrer", "DENY"),
            "{path}"
        );
        assert_eq!(
            header("cache-control"),
            if path.starts_with("/api") { "no-store" } else { "no-cache" },
            "{path}"
        );
    }
    for (method, path, code) in [
        ("POST", "/api/v1/nodes", 405),
        ("DELETE", "/api/v1/pods/team/p", 405),
        ("GET", "/api/v1/what-if", 405),
        ("GET", "/assets/..%2Fmod.rs", 404),
    ] {
        assert_eq!(replica.call(method, path, Body::empty()).await.0, code, "{method} {path}");
    }
    let question =
        json!({"metadata": {"name": "supposed"}, "spec": whole("supposed", 1)["spec"]}).to_string();
    let (code, answer) = replica.call("POST", "/api/v1/what-if", question).await;
    assert_eq!((code, &parse_json(&String::from_utf8(answer).unwrap())["wouldDo"]), (200, &json!(2)));
    assert_eq!(replica.call("POST", "/api/v1/what-if", "nonsense").await.0, 400);
    assert_eq!(replica.call("POST", "/api/v1/what-if", vec![b' '; 3 << 20]).await.0, 400);
}

#[tokio::test]
async fn an_unchanged_file_is_answered_with_not_modified() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let ask = |tag: Option<String>| {
        let mut request = Request::get("/assets/base.css");
        if let Some(tag) = tag {
            request = request.header("if-none-match", tag);
        }
        replica.router.clone().oneshot(request.body(Body::empty()).unwrap())
    };
    let first = ask(None).await.unwrap();
    let tag = first.headers()["etag"].to_str().unwrap().to_owned();
    assert_eq!(
        (first.status().as_u16(), first.headers()["content-type"].to_str().unwrap()),
        (200, "text/css; charset=utf-8")
    );
    assert_eq!(ask(Some(tag)).await.unwrap().status(), 304);
}

#[tokio::test]
async fn decisions_are_listed_newest_first() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    // A pod whose GPUs kube-scheduler counts, so both calls have the same answer.
    let pod = make(&api, &pod("p", &[("aliyun.com/gpu", "2")]));
    let question = json!({"Pod": pod, "NodeNames": ["a", "b"]});
    replica.post("/scheduler/filter", &question).await;
    replica.post("/scheduler/filter", &question).await;
    assert_eq!(replica.bind(&pod, "a").await, "");
    let late = make(&api, &whole("late", 3));
    replica.post("/scheduler/filter", &json!({"Pod": late, "NodeNames": ["a", "b"]})).await;
    assert_ne!(replica.bind(&late, "a").await, "");
    replica
        .post("/scheduler/preempt", &json!({"Pod": late, "NodeNameToMetaVictims": {"a": {"Pods": []}}}))
        .await;
    // Decisions about pods without GPUs are not recorded.
    let plain = json!({"metadata": {"name": "plain"}, "spec": {"containers": [{"name": "c"}]}});
    replica.post("/scheduler/filter", &json!({"Pod": plain, "NodeNames": ["a"]})).await;
    let all = json_at(&replica, "/api/v1/decisions").await;
    let short: Vec<Value> =
        all.as_array().unwrap().iter().map(|one| json!([one["pod"], one["outcome"], one["times"]])).collect();
    assert_eq!(
        json!(short),
        json!([
            ["late", "no-victims", 1],
            ["late", "not-bound", 1],
            ["late", "fits-nowhere", 1],
            ["p", "bound", 1],
            ["p", "fits", 2]
        ])
    );
    assert_eq!((&all[2]["refused"], &all[3]["gpus"]), (&json!({"fewer-gpus": 2}), &json!([0, 1])));
    assert!(all[3]["why"].as_str().unwrap().ends_with("leaves no idle GPU"), "{}", all[3]["why"]);
    assert!(all[1]["error"].as_str().unwrap().contains("fewer than 3 GPUs"));
    let bound = json_at(&replica, "/api/v1/decisions?outcome=bound&namespace=team&limit=5").await;
    assert_eq!(bound.as_array().unwrap().len(), 1);
}

/// Returns the next event of a stream and skips keep-alive comments.
async fn next_event(stream: &mut BodyDataStream) -> (String, Value) {
    loop {
        let bytes = stream.next().await.unwrap().unwrap();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        let field = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name)).map(|value| value.trim().to_owned())
        };
        if let (Some(id), Some(data)) = (field("id:"), field("data:")) {
            return (id, parse_json(&data));
        }
    }
}

async fn follow(replica: &Replica) -> BodyDataStream {
    let request = Request::get("/api/v1/stream").body(Body::empty()).unwrap();
    let answer = replica.router.clone().oneshot(request).await.unwrap();
    assert_eq!(answer.headers()["content-type"], "text/event-stream");
    answer.into_body().into_data_stream()
}

#[tokio::test]
async fn the_stream_numbers_its_events_and_merges_bursts() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    let mut stream = follow(&replica).await;
    let (_, mut news) = next_event(&mut stream).await;
    while news["ready"] != json!(true) {
        news = next_event(&mut stream).await.1;
    }
    let version = news["version"].as_u64().unwrap();
    make(&api, &whole("waits", 9));
    let (_, news) = next_event(&mut stream).await;
    assert_eq!(
        (&news["waiting"], &news["nodes"], &news["version"]),
        (&json!(true), &json!([]), &json!(version + 1))
    );
    let version = version + 1;
    // Forty pods created at once cause far fewer events, and the events name the pods' node.
    let pods: Vec<Value> = (0..40).map(|number| make(&api, &share(&format!("p{number}"), 2))).collect();
    for pod in &pods {
        assert_eq!(replica.bind(pod, "b").await, "");
    }
    let mut events = 0;
    let mut named = BTreeSet::new();
    while json_at(&replica, "/api/v1/cluster").await["placedPods"] != json!(40) || !named.contains("b") {
        let (id, news) = next_event(&mut stream).await;
        events += 1;
        assert_eq!(news["version"], json!(version + events), "none is missing for a reader that keeps up");
        assert_eq!(id, (version + events).to_string());
        named.extend(news["nodes"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()));
    }
    assert!(events < 40, "{events}");
    assert_eq!(named, BTreeSet::from(["b".to_owned()]));
    // A client that connects later starts with the newest version.
    let (_, first) = next_event(&mut follow(&replica).await).await;
    assert!(first["version"].as_u64().unwrap() >= version + events);
}

#[tokio::test]
async fn a_follower_names_the_leader() {
    let api = cluster().await;
    let _leader = Replica::ready(&api, "the-leader").await;
    let follower = Replica::start(&api, "another").await_leader().await;
    let status = json_at(&follower, "/api/v1/status").await;
    assert_eq!((&status["ready"], &status["leader"]), (&json!(false), &json!("the-leader")));
    for path in ["/api/v1/cluster", "/api/v1/decisions", "/api/v1/pods/team/p/explanation"] {
        let (code, text) = follower.get(path).await;
        assert_eq!((code, &parse_json(&text)["leader"]), (503, &json!("the-leader")), "{path}");
    }
    assert_eq!(follower.get("/").await.0, 200);
}

impl Replica {
    /// Waits until the replica knows the leader.
    async fn await_leader(self) -> Self {
        for _ in 0..1_000 {
            let (_, text) = self.get("/api/v1/status").await;
            if parse_json(&text)["leader"].is_string() {
                break;
            }
            tokio::task::yield_now().await;
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        self
    }
}

/// Serves one answer at `/v1/use`. Returns the address of the server.
async fn agent(answer: Value) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().route("/v1/use", get(|| async move { Json(answer) }));
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

#[tokio::test]
async fn invalid_queries_get_a_json_error() {
    let replica = Replica::ready(&cluster().await, "one").await;
    for path in ["/api/v1/nodes?limit=abc", "/api/v1/pods?limit=abc", "/api/v1/decisions?limit=abc"] {
        let (code, text) = replica.get(path).await;
        let answer = parse_json(&text);
        assert_eq!(code, 400, "{path}");
        assert!(answer["error"].as_str().unwrap().contains("limit"), "{path}: {answer}");
    }
}

#[tokio::test]
async fn usage_comes_from_the_agent_or_is_reported_as_not_measured() {
    let api = cluster().await;
    let container =
        |pod: &str| json!({"namespace": "team", "pod": pod, "uid": "u", "container": "main", "gpus": []});
    let good = agent(json!({"gpus": [{"uuid": "GPU-a-0", "index": 0, "memoryUsedMiB": 7}], "containers": [container("p"), container("q")]})).await;
    let odd = agent(json!({"gpus": "<script>"})).await;
    let replica = Replica::ready(&api, "one").await;
    let pod = make(&api, &whole("p", 1));
    assert_eq!(replica.bind(&pod, "a").await, "");
    let ask = async |address: &str| {
        api.patch("/api/v1/nodes/a", &json!({"metadata": {"annotations": {"tessera.dev/agent": address}}}))
            .unwrap();
        let knows = || view::node::agent(&replica.app.read(), "a").is_some_and(|known| known.url == address);
        eventually(knows).await;
        json_at(&replica, "/api/v1/nodes/a/use").await
    };
    let measured = ask(&good).await;
    assert_eq!(measured["use"]["gpus"], json!([{"uuid": "GPU-a-0", "index": 0, "memoryUsedMiB": 7}]));
    assert_eq!(measured["notMeasured"], Value::Null);
    // The pod's node is known by name after the watch has delivered the bound pod.
    let knows = || view::pods::agent(&replica.app.read(), "team", "p").is_some_and(|known| known.url == good);
    eventually(knows).await;
    let of_pod = json_at(&replica, "/api/v1/pods/team/p/use").await;
    assert_eq!(of_pod["use"]["containers"], json!([container("p")]), "nothing of other pods");
    for (address, words) in [
        (odd.as_str(), "sent an answer that cannot be parsed"),
        ("http://127.0.0.1:9", "cannot be reached"),
        ("file:///etc/passwd", "it should read http://HOST:PORT"),
        ("nonsense", "it should read http://HOST:PORT"),
    ] {
        let answer = ask(address).await;
        assert_eq!(answer["use"], Value::Null, "{address}");
        assert!(answer["notMeasured"].as_str().unwrap().contains(words), "{address}: {answer}");
    }
    let silent = json_at(&replica, "/api/v1/nodes/b/use").await;
    assert_eq!(silent, json!({"notMeasured": "the node does not say where its agent answers"}));
}

fn assets() -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/dashboard/assets");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.map(|path| (path.clone(), std::fs::read_to_string(path).unwrap())).collect()
}

/// Returns the keys of a table of texts, which has one key per line.
fn keys(name: &str) -> BTreeSet<String> {
    let (_, text) = assets().into_iter().find(|(path, _)| path.ends_with(name)).unwrap();
    let mut keys: Vec<String> = Vec::new();
    for line in text.lines() {
        // A line may have several texts.
        let mut rest = line.trim();
        while let Some((key, text)) = rest.strip_prefix('"').and_then(|rest| rest.split_once("\": \"")) {
            keys.push(key.to_owned());
            let end = text.match_indices('"').find(|(place, _)| !text[..*place].ends_with('\\')).unwrap().0;
            rest = text[end + 1..].trim_start_matches([',', ' ']);
        }
    }
    let unique: BTreeSet<String> = keys.iter().cloned().collect();
    assert_eq!(unique.len(), keys.len(), "{name} has a key twice");
    unique
}

/// Returns all values of `RejectReason::kind`, read from its source, and filter's own reasons.
fn kinds() -> Vec<&'static str> {
    let source = include_str!("../../../core/src/admission.rs");
    let (_, body) = source.split_once("pub fn kind(&self) -> &'static str {").unwrap();
    let (body, _) = body.split_once("\n    }\n").unwrap();
    let quoted = body.split("=> \"").skip(1).map(|rest| rest.split('"').next().unwrap());
    quoted.chain(["quota", "bad-request"]).collect()
}

#[test]
fn both_languages_have_the_same_keys_and_every_used_key() {
    let of = |language: &str| {
        let [texts, reasons] = ["text", "reasons"].map(|table| keys(&format!("{table}-{language}.js")));
        assert_eq!(texts.intersection(&reasons).count(), 0, "a key is in both tables");
        &texts | &reasons
    };
    let (english, chinese) = (of("en"), of("zh"));
    assert_eq!(english.symmetric_difference(&chinese).collect::<Vec<_>>(), Vec::<&String>::new());
    assert!(english.len() > 150);
    let scripts: Vec<(PathBuf, String)> = assets()
        .into_iter()
        .filter(|(path, _)| path.extension().is_some_and(|ending| ending == "js"))
        .collect();
    for (path, text) in &scripts {
        for (place, call) in text.match_indices("t(\"") {
            // This skips calls of functions whose name ends in `t`, such as `get`.
            if text[..place].ends_with(|before: char| before.is_alphanumeric()) {
                continue;
            }
            let key = text[place + call.len()..].split('"').next().unwrap();
            assert!(english.contains(key), "{}: no text for {key:?}", path.display());
        }
    }
    let made_up = ["kind.", "reason.", "outcome.", "decision.", "fullness.", "state.", "theme."];
    for key in english.iter().filter(|key| !made_up.iter().any(|family| key.starts_with(family))) {
        let quoted = format!("\"{key}\"");
        let is_table = |path: &Path| {
            ["text-en.js", "text-zh.js", "reasons-en.js", "reasons-zh.js"]
                .iter()
                .any(|table| path.ends_with(table))
        };
        let used = scripts.iter().any(|(path, text)| !is_table(path) && text.contains(&quoted));
        assert!(used, "nobody uses the text {key:?}");
    }
    assert!(kinds().len() > 15, "{:?}", kinds());
    for kind in kinds() {
        assert!(english.contains(&format!("kind.{kind}")), "{kind}");
    }
}

#[tokio::test]
async fn every_asset_is_embedded_and_none_parses_markup() {
    let api = cluster().await;
    let replica = Replica::ready(&api, "one").await;
    for (path, text) in assets() {
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let (code, served) = replica.get(&format!("/assets/{name}")).await;
        assert_eq!((code, served == text), (200, true), "{name}");
        let lines = text.lines().count();
        assert!(lines <= 300, "{name} has {lines} lines; split it");
        for word in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "setAttribute(\"style\"",
            "<script>",
            "style=\"",
            "http://",
            "https://",
        ] {
            let allowed = word == "http://" && (name == "dom.js" || name == "icon.svg");
            assert!(allowed || !text.contains(word), "{name}: {word} has no place in a page");
        }
    }
}
