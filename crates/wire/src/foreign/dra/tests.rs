use super::*;
use crate::foreign::objects::{Amount, Pod};

/// A claim as the API server of Kubernetes 1.36 returns it, with fields that Tessera does not read.
const CLAIM: &str = r#"{"apiVersion":"resource.k8s.io/v1","kind":"ResourceClaim",
 "metadata":{"name":"two","namespace":"team","uid":"u-1","resourceVersion":"812","finalizers":["resource.kubernetes.io/delete-protection"]},
 "spec":{"devices":{"requests":[
   {"name":"small","exactly":{"deviceClassName":"tessera","allocationMode":"ExactCount","count":1,
     "capacity":{"requests":{"cores":"30","memory":"8Gi"}},"selectors":[{"cel":{"expression":"true"}}]}},
   {"name":"big","firstAvailable":[{"name":"h200","deviceClassName":"tessera","count":2},{"name":"any","deviceClassName":"tessera"}]},
   {"name":"watch","exactly":{"deviceClassName":"tessera","allocationMode":"All","adminAccess":true}}],
   "constraints":[{"requests":["small"],"matchAttribute":"gpu.tessera.dev/linkDomain"}],
   "config":[{"requests":["small"],"opaque":{"driver":"gpu.tessera.dev","parameters":{"policy":"link"}}}]}},
 "status":{"allocation":{"allocationTimestamp":"2026-01-01T00:00:00Z","nodeSelector":{"nodeSelectorTerms":[]},
   "devices":{"results":[
     {"request":"small","driver":"gpu.tessera.dev","pool":"n1","device":"gpu-0","shareID":"s-1","consumedCapacity":{"cores":"30","memory":"8Gi"}},
     {"request":"big/any","driver":"gpu.tessera.dev","pool":"n1","device":"gpu-1","shareID":"s-2","consumedCapacity":{"cores":"100","memory":"80Gi"}},
     {"request":"watch","driver":"gpu.tessera.dev","pool":"n1","device":"gpu-0","adminAccess":true,"tolerations":null},
     {"request":"nic","driver":"nic.example.com","pool":"n1","device":"eth1"}],
   "config":[{"source":"FromClaim","requests":["small"],"opaque":{"driver":"gpu.tessera.dev","parameters":{"policy":"link"}}}]}},
  "reservedFor":[{"resource":"pods","name":"p","uid":"p-1"},{"apiGroup":"batch","resource":"jobs","name":"j","uid":"j-1"}],
  "devices":[{"driver":"gpu.tessera.dev","pool":"n1","device":"gpu-0","shareID":"s-1","conditions":[{"type":"Ready","status":"True"}]}]}}"#;

#[test]
fn reads_a_claim_with_every_field() {
    let claim: ResourceClaim = serde_json::from_str(CLAIM).unwrap();
    let requests = &claim.spec.devices.requests;
    let small = requests[0].exactly.as_ref().unwrap();
    assert_eq!(small.devices.device_class_name, "tessera");
    assert_eq!(small.devices.capacity.requests["memory"], Amount("8Gi".into()));
    assert_eq!(small.devices.selectors[0].cel.as_ref().unwrap().expression, "true");
    let alternatives: Vec<_> = requests[1].first_available.iter().map(|one| one.devices.count).collect();
    assert_eq!(alternatives, [Some(2), None]);
    assert!(requests[2].exactly.as_ref().unwrap().admin_access);
    let results: Vec<_> = claim.results("gpu.tessera.dev").collect();
    assert_eq!(results.iter().map(|one| one.main_request()).collect::<Vec<_>>(), ["small", "big", "watch"]);
    assert_eq!(results[0].share_id.as_deref(), Some("s-1"));
    assert!(results[2].admin_access && results[2].share_id.is_none());
    assert!(claim.is_reserved_for("p-1") && !claim.is_reserved_for("j-1"));
    assert_eq!(claim.status.devices[0].conditions[0].kind, "Ready");
    let config = claim.status.allocation.as_ref().unwrap().devices.config[0].opaque.as_ref().unwrap();
    assert_eq!(config.parameters["policy"], "link");
}

#[test]
fn writes_what_it_read() {
    let claim: ResourceClaim = serde_json::from_str(CLAIM).unwrap();
    let again: ResourceClaim = serde_json::from_str(&serde_json::to_string(&claim).unwrap()).unwrap();
    assert_eq!(again, claim);
    let class = r#"{"metadata":{"name":"gpu"},"spec":{"selectors":[{"cel":{"expression":"device.driver == 'gpu.tessera.dev'"}}],"extendedResourceName":"nvidia.com/gpu"}}"#;
    let read: DeviceClass = serde_json::from_str(class).unwrap();
    assert_eq!(serde_json::to_string(&read).unwrap(), class);
}

#[test]
fn nulls_and_missing_fields_are_defaults() {
    for json in ["{}", r#"{"metadata":{},"spec":null,"status":null}"#, r#"{"spec":{"devices":null}}"#] {
        let claim: ResourceClaim = serde_json::from_str(json).unwrap();
        assert_eq!(claim, ResourceClaim::default(), "{json}");
    }
    let request: DeviceRequest = serde_json::from_str(
        r#"{"name":"a","exactly":{"deviceClassName":"tessera","count":null,"capacity":null}}"#,
    )
    .unwrap();
    assert_eq!(request.exactly.unwrap().devices.count, None);
}

#[test]
fn attributes_of_unknown_kinds_are_empty() {
    let device: Device = serde_json::from_str(
        r#"{"name":"d","attributes":{"a":{"strings":["x"]},"b":{"int":3},"c":{"version":"1.2.3"}}}"#,
    )
    .unwrap();
    let values = [Attribute::default(), Attribute::int(3), Attribute::version("1.2.3")];
    assert_eq!(device.attributes.into_values().collect::<Vec<_>>(), values);
}

#[test]
fn the_time_of_a_taint_does_not_count() {
    let slice = |time: Option<&str>, value: &str| SliceSpec {
        devices: vec![Device {
            taints: vec![DeviceTaint {
                value: value.to_owned(),
                time_added: time.map(str::to_owned),
                ..DeviceTaint::default()
            }],
            ..Device::default()
        }],
        ..SliceSpec::default()
    };
    assert!(slice(None, "broken").offers_same(&slice(Some("2026-01-01T00:00:00Z"), "broken")));
    assert!(!slice(None, "broken").offers_same(&slice(None, "cordoned")));
}

fn pod() -> Pod {
    serde_json::from_str(
        r#"{"metadata":{"name":"p"},
        "spec":{"resourceClaims":[{"name":"own","resourceClaimName":"shared"},{"name":"made","resourceClaimTemplateName":"t"},
            {"name":"soon","resourceClaimTemplateName":"later"},{"name":"none","resourceClaimTemplateName":"t"}],
          "initContainers":[{"name":"load","resources":{"claims":[{"name":"own"}]}}],
          "containers":[{"name":"main","resources":{"claims":[{"name":"own","request":"small"},{"name":"made"},{"name":"soon"},{"name":"unknown"}]}},
            {"name":"other","resources":{"limits":{"nvidia.com/gpu":"2"}}}]},
        "status":{"resourceClaimStatuses":[{"name":"made","resourceClaimName":"p-made-x7"},{"name":"none"}],
          "extendedResourceClaimStatus":{"resourceClaimName":"p-extended-9",
            "requestMappings":[{"containerName":"other","resourceName":"nvidia.com/gpu","requestName":"container-1-request-0"}]}}}"#,
    )
    .unwrap()
}

#[test]
fn finds_the_claims_of_a_pod() {
    let names: Vec<_> = pod().claim_names().map(|name| format!("{name:?}")).collect();
    assert_eq!(
        names,
        [r#"Known("shared")"#, r#"Known("p-made-x7")"#, r#"Pending("later")"#, r#"Known("p-extended-9")"#]
    );
}

#[test]
fn finds_the_requests_of_each_container() {
    let pod = pod();
    let used: Vec<_> =
        pod.claimed_requests().map(|used| (used.container, used.claim, used.request)).collect();
    assert_eq!(
        used,
        [
            ("load", "shared", None),
            ("main", "shared", Some("small")),
            ("main", "p-made-x7", None),
            ("other", "p-extended-9", Some("container-1-request-0")),
        ]
    );
}
