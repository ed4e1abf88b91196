use tessera_core::gpu::Gpu;
use tessera_core::request::ContainerRole;
use tessera_core::topology::Topology;
use tessera_core::units::MilliCpu;

use super::*;

fn node() -> Node {
    let gpu = |index: u8| {
        Gpu::new(GpuIndex(index), format!("GPU-{index}").as_str().into(), "T4".into(), MiB(16_276))
    };
    let gpus = (0..4).map(gpu).collect();
    Node::new("node-a".into(), gpus, Topology::unknown(4), MilliCpu::ZERO, MiB::ZERO).unwrap()
}

fn spec(containers: &[(&str, &[(&str, &str)])]) -> PodSpec {
    let containers: Vec<serde_json::Value> = containers
        .iter()
        .map(|(name, limits)| {
            let limits: BTreeMap<_, _> = limits.iter().copied().collect();
            serde_json::json!({"name": name, "resources": {"limits": limits}})
        })
        .collect();
    serde_json::from_value(serde_json::json!({ "containers": containers })).unwrap()
}

fn grant(container: &str, gpus: &[(u8, Hold)]) -> ContainerGrant {
    let holds = gpus.iter().map(|(gpu, hold)| (GpuIndex(*gpu), *hold)).collect();
    ContainerGrant { container: container.to_owned(), role: ContainerRole::Main, holds }
}

fn share(compute_percent: u32, memory: u64) -> Hold {
    Hold::Share { compute_percent: Percent(compute_percent), memory: MiB(memory) }
}

/// Writes the annotations, compares them with `expected`, and parses both forms.
fn check(spec: &PodSpec, grants: &[ContainerGrant], expected: &[(&str, &str)]) {
    let mut written = annotations(spec, grants, &node(), MemoryUnit::GiB, 17).unwrap();
    assert_eq!(parse(spec, &written, &node(), MemoryUnit::GiB).unwrap().as_deref(), Some(grants));
    assert_eq!(errors(spec, &written, &node()).len(), 0, "{written:?}");
    let ours = written.remove(KEY).unwrap();
    assert!(ours.contains("\"uuid\":\"GPU-"), "{ours}");
    let expected: Annotations =
        expected.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    assert_eq!(written, expected);
    if !expected.is_empty() {
        assert_eq!(parse(spec, &written, &node(), MemoryUnit::GiB).unwrap().as_deref(), Some(grants));
    }
}

#[test]
fn gputopology_grants_no_gpus_to_init_containers() {
    let spec: PodSpec = serde_json::from_value(serde_json::json!({
        "initContainers": [{"name": "load", "resources": {"limits": {"aliyun.com/gpu": "1"}}}],
        "containers": [{"name": "train", "resources": {"limits": {"aliyun.com/gpu": "2"}}}],
    }))
    .unwrap();
    let group = Annotations::from([("ALIYUN_COM_GPU_GROUP".to_owned(), "1,2".to_owned())]);
    let read = parse(&spec, &group, &node(), MemoryUnit::GiB).unwrap().unwrap();
    assert_eq!(read, [grant("train", &[(1, Hold::Whole), (2, Hold::Whole)])]);
}

#[test]
fn writes_and_parses_annotations_of_gputopology() {
    check(
        &spec(&[("a", &[("aliyun.com/gpu", "2")]), ("b", &[("aliyun.com/gpu", "1")])]),
        &[grant("a", &[(0, Hold::Whole), (3, Hold::Whole)]), grant("b", &[(1, Hold::Whole)])],
        &[
            ("ALIYUN_COM_GPU_ASSIGNED", "false"),
            ("ALIYUN_COM_GPU_ASSUME_TIME", "17"),
            ("ALIYUN_COM_GPU_GROUP", "0,3,1"),
        ],
    );
}

#[test]
fn writes_and_parses_annotations_of_gpushare() {
    check(
        &spec(&[("a", &[("aliyun.com/gpu-mem", "2")]), ("log", &[]), ("b", &[("aliyun.com/gpu-mem", "3")])]),
        &[grant("a", &[(1, share(0, 2048))]), grant("b", &[(2, share(0, 3072))])],
        &[
            ("ALIYUN_COM_GPU_MEM_ASSIGNED", "false"),
            ("ALIYUN_COM_GPU_MEM_ASSUME_TIME", "17"),
            ("ALIYUN_COM_GPU_MEM_DEV", "15"),
            ("ALIYUN_COM_GPU_MEM_IDX", "1"),
            ("ALIYUN_COM_GPU_MEM_POD", "5"),
            ("scheduler.framework.gpushare.allocation", r#"{"0":{"1":2},"2":{"2":3}}"#),
        ],
    );
}

#[test]
fn writes_and_parses_annotations_of_vcuda() {
    check(
        &spec(&[
            ("a", &[("tencent.com/vcuda-core", "50"), ("tencent.com/vcuda-memory", "30")]),
            ("b", &[("tencent.com/vcuda-core", "200")]),
        ]),
        &[grant("a", &[(2, share(50, 7680))]), grant("b", &[(0, Hold::Whole), (1, Hold::Whole)])],
        &[
            ("tencent.com/gpu-assigned", "false"),
            ("tencent.com/predicate-gpu-idx-0", "2"),
            ("tencent.com/predicate-gpu-idx-1", "0,1"),
            ("tencent.com/predicate-node", "node-a"),
            ("tencent.com/predicate-time", "17"),
        ],
    );
}

#[test]
fn every_key_that_cannot_be_parsed_has_an_error() {
    let spec = spec(&[("a", &[("aliyun.com/gpu-mem", "2")])]);
    let bad = [
        ("ALIYUN_COM_GPU_ASSIGNED", "yes"),
        ("ALIYUN_COM_GPU_ASSUME_TIME", "now"),
        ("ALIYUN_COM_GPU_GROUP", "0;1"),
        ("ALIYUN_COM_GPU_MEM_ASSIGNED", ""),
        ("ALIYUN_COM_GPU_MEM_ASSUME_TIME", "-1"),
        ("ALIYUN_COM_GPU_MEM_DEV", "16GiB"),
        ("ALIYUN_COM_GPU_MEM_IDX", "first"),
        ("ALIYUN_COM_GPU_MEM_POD", "2.5"),
        ("scheduler.framework.gpushare.allocation", "{"),
        ("tencent.com/gpu-assigned", "1"),
        ("tencent.com/predicate-gpu-idx-0", "a"),
        ("tencent.com/predicate-gpu-idx-1", "b"),
        ("tencent.com/predicate-gpu-idx-a", "0"),
        ("tencent.com/predicate-time", "late"),
        ("tessera.dev/grant", "[]"),
    ];
    let annotations = bad.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let said: Vec<String> = errors(&spec, &annotations, &node()).iter().map(ToString::to_string).collect();
    let mut keys: Vec<&str> = said.iter().filter_map(|text| Some(text.split_once(": ")?.0)).collect();
    keys.sort_unstable();
    assert_eq!(keys, bad.map(|(key, _)| key), "{said:?}");
}

#[test]
fn nvidia_gets_only_the_annotation_of_tessera() {
    check(&spec(&[("a", &[("nvidia.com/gpu", "1")])]), &[grant("a", &[(3, Hold::Whole)])], &[]);
}

#[test]
fn marks_gpus_as_assigned() {
    let asked = spec(&[("a", &[("tencent.com/vcuda-core", "100")]), ("b", &[("aliyun.com/gpu", "1")])]);
    let expected = [("ALIYUN_COM_GPU_ASSIGNED", "true"), ("tencent.com/gpu-assigned", "true")];
    let expected: Annotations = expected.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
    let scheduled = Annotations::from([("ALIYUN_COM_GPU_ASSIGNED".to_owned(), "false".to_owned())]);
    assert_eq!(assigned(&asked, &scheduled, MemoryUnit::GiB).unwrap(), expected);
    let bypassed = assigned(&asked, &Annotations::new(), MemoryUnit::GiB).unwrap();
    assert_eq!(bypassed.into_keys().collect::<Vec<_>>(), ["tencent.com/gpu-assigned"]);
}

#[test]
fn parses_the_older_annotation_of_gpushare() {
    let asked = spec(&[("a", &[("aliyun.com/gpu-mem", "2")])]);
    let read = |index: &str| {
        let annotations = Annotations::from([("ALIYUN_COM_GPU_MEM_IDX".to_owned(), index.to_owned())]);
        parse(&asked, &annotations, &node(), MemoryUnit::GiB)
    };
    assert_eq!(read("3").unwrap(), Some(vec![grant("a", &[(3, share(0, 2048))])]));
    assert_eq!(read("-1").unwrap(), None);
    let error = read("x").unwrap_err().to_string();
    assert_eq!(error, "ALIYUN_COM_GPU_MEM_IDX: found \"x\", expected GPU indexes such as 0,1");
}

#[test]
fn rejects_unknown_gpus_and_containers() {
    let asked = spec(&[("a", &[("nvidia.com/gpu", "1")])]);
    let error = |json: &str| {
        let annotations = Annotations::from([(KEY.to_owned(), json.to_owned())]);
        parse(&asked, &annotations, &node(), MemoryUnit::GiB).unwrap_err().to_string()
    };
    let gpu = |uuid: &str| format!(r#"[{{"uuid":"{uuid}","index":0,"cores":100}}]"#);
    assert_eq!(
        error(&format!(r#"{{"a":{}}}"#, gpu("GPU-9"))),
        "tessera.dev/grant: node node-a has no GPU GPU-9"
    );
    let foreign = error(&format!(r#"{{"x":{}}}"#, gpu("GPU-1")));
    assert_eq!(foreign, "tessera.dev/grant: the pod has no container \"x\"");
    assert!(error("[]").starts_with("tessera.dev/grant: "));
}
