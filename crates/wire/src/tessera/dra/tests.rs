use proptest::prelude::*;
use tessera_core::gpu::{Gpu, Health};
use tessera_core::grant::Hold;
use tessera_core::node::Node;
use tessera_core::request::{MemoryRequest, Request, Share};
use tessera_core::topology::{Link, PcieLevel, Topology};
use tessera_core::units::{GpuIndex, MiB, MilliCpu, Percent};

use super::*;
use crate::foreign::dra::{AllocationResult, CapacityRequest, RequestedDevices, ResourceClaim, SliceSpec};
use crate::foreign::objects::Amount;

const MEMORY_MIB: u64 = 81_920;

fn gpus(count: u8) -> Vec<Gpu> {
    let gpu = |index: u8| Gpu {
        numa: Some(u16::from(index / 2)),
        ..Gpu::new(
            GpuIndex(index),
            format!("GPU-{index}").as_str().into(),
            "NVIDIA H100 80GB".into(),
            MiB(MEMORY_MIB),
        )
    };
    (0..count).map(gpu).collect()
}

/// Returns links by which GPUs 0 and 1 reach each other, and GPUs 2 and 3.
fn pairs(count: usize) -> Topology {
    Topology::from_pairs(count, |a, b| Link {
        pcie: Some(PcieLevel::Node),
        nvlinks: if a.0 / 2 == b.0 / 2 { 4 } else { 0 },
    })
}

fn node(count: u8) -> Node {
    Node::new("n1".into(), gpus(count), Topology::unknown(usize::from(count)), MilliCpu(0), MiB(0)).unwrap()
}

fn offer(gpus: &[Gpu], sharing: Sharing) -> SliceSpec {
    let details = [GpuDetails {
        pci_address: "00000000:3B:00.0".into(),
        pcie_root: "pci0000:3a".into(),
        architecture: "Hopper".into(),
        compute_capability: "9.0".into(),
    }];
    let topology = pairs(gpus.len());
    let node = NodeDevices {
        node: "n1",
        gpus,
        topology: &topology,
        details: &details,
        driver_version: Some("535.129.03"),
        sharing,
    };
    slice(&node, 3)
}

#[test]
fn writes_the_documented_slice() {
    let expected = include_str!("golden/slice.json");
    let written = serde_json::to_string_pretty(&offer(&gpus(1), Sharing::Shares)).unwrap();
    assert_eq!(written, expected.trim_end());
}

#[test]
fn whole_gpus_have_no_fields_of_shared_devices() {
    let whole = offer(&gpus(2), Sharing::WholeGpus);
    assert!(!is_shared(&whole));
    assert!(is_shared(&offer(&gpus(2), Sharing::Shares)));
    let text = serde_json::to_string(&whole).unwrap();
    assert!(!text.contains("allowMultipleAllocations") && !text.contains("requestPolicy"), "{text}");
}

#[test]
fn an_unhealthy_gpu_is_tainted_with_the_reason() {
    let mut broken = gpus(5);
    let states =
        [Health::Healthy, Health::Unhealthy, Health::InMigMode, Health::AwaitingReset, Health::Cordoned];
    for (gpu, health) in broken.iter_mut().zip(states) {
        gpu.health = health;
    }
    let slice = offer(&broken, Sharing::Shares);
    let taints = slice.devices.iter().map(|device| device.taints.first().map(|one| one.value.as_str()));
    let taints: Vec<_> = taints.collect();
    assert_eq!(taints, [None, Some("broken"), Some("mig-mode"), Some("awaiting-reset"), Some("cordoned")]);
}

#[test]
fn gpus_that_reach_each_other_over_nvlinks_share_a_domain() {
    let slice = offer(&gpus(4), Sharing::Shares);
    let domains: Vec<_> = slice.devices.iter().map(|device| device.attributes["linkDomain"].int).collect();
    assert_eq!(domains, [Some(0), Some(0), Some(2), Some(2)]);
}

#[test]
fn names_of_devices_and_slices_are_those_of_their_gpus_and_nodes() {
    assert_eq!(gpu_of_device("gpu-7"), Some(GpuIndex(7)));
    for other in ["gpu-", "gpu-07", "gpu-64", "gpu-256", "gpu--1", "gpu-+1", "gpu7", "GPU-7"] {
        assert_eq!(gpu_of_device(other), None, "{other}");
    }
    assert_eq!(slice_name("n1"), "n1-gpu.tessera.dev");
    let (long, longer) = (slice_name(&"a".repeat(250)), slice_name(&"a".repeat(251)));
    assert!(long.len() <= 253 && long != longer, "{long}");
}

fn result(device: &str, amounts: &[(&str, &str)]) -> AllocationResult {
    AllocationResult {
        request: "r".into(),
        driver: DRIVER.into(),
        pool: "n1".into(),
        device: device.into(),
        share_id: Some("s".into()),
        consumed_capacity: amounts
            .iter()
            .map(|(name, amount)| ((*name).to_owned(), Amount((*amount).to_owned())))
            .collect(),
        ..AllocationResult::default()
    }
}

fn claim(results: Vec<AllocationResult>) -> ResourceClaim {
    let mut claim = ResourceClaim::default();
    claim.status.allocation.get_or_insert_default().devices.results = results;
    claim
}

fn check_hold(amounts: &[(&str, &str)], expected: Hold) {
    let holds = claim_holds(&claim(vec![result("gpu-1", amounts)]), &node(2)).unwrap();
    assert_eq!(
        holds,
        [ClaimHold {
            request: "r".into(),
            gpu: GpuIndex(1),
            hold: Some(expected),
            share_id: Some("s".into())
        }],
        "{amounts:?}"
    );
}

#[test]
fn an_allocation_holds_its_amounts() {
    let share = |percent: u32, mib: u64| Hold::Share { compute_percent: Percent(percent), memory: MiB(mib) };
    check_hold(&[("cores", "30"), ("memory", "8Gi")], share(30, 8192));
    check_hold(&[("gpu.tessera.dev/cores", "30"), ("gpu.tessera.dev/memory", "8Gi")], share(30, 8192));
    check_hold(&[("cores", "0"), ("memory", "1Mi")], share(0, 1));
    check_hold(&[("cores", "29500m"), ("memory", "1")], share(30, 1));
    check_hold(&[("cores", "100"), ("memory", "80Gi")], Hold::Whole);
    check_hold(&[("cores", "30")], share(30, MEMORY_MIB));
    check_hold(&[("memory", "8Gi")], share(100, 8192));
    // Where the API server has no shares, an allocation names no amounts.
    check_hold(&[], Hold::Whole);
}

#[test]
fn an_impossible_allocation_is_refused_with_its_reason() {
    let refused = |result: AllocationResult, expected: &str| {
        let error = claim_holds(&claim(vec![result]), &node(2)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(result("gpu-2", &[]), "device gpu-2, which node n1 does not have");
    refused(result("card", &[]), "device card, which node n1 does not have");
    refused(AllocationResult { pool: "n2".into(), ..result("gpu-0", &[]) }, "of pool n2, not of node n1");
    refused(result("gpu-0", &[("cores", "101")]), "holds 101 of cores, which is more than gpu-0 has");
    refused(result("gpu-0", &[("memory", "81Gi")]), "holds 81Gi of memory, which is more than gpu-0 has");
    refused(result("gpu-0", &[("memory", "-1")]), "holds -1 of memory: expected an amount");
    refused(result("gpu-0", &[("cores", "many")]), "holds many of cores: expected an amount");
    refused(result("gpu-0", &[("lanes", "1")]), "holds capacity lanes, which no GPU has");
}

#[test]
fn admin_access_and_other_drivers_hold_nothing() {
    let admin = AllocationResult { admin_access: true, ..result("gpu-0", &[]) };
    let other = AllocationResult { driver: "nic.example.com".into(), device: "eth1".into(), ..admin.clone() };
    let share = result("gpu-1", &[("cores", "30"), ("memory", "1Gi")]);
    let claim = claim(vec![admin, other, share.clone(), share]);
    let holds = claim_holds(&claim, &node(2)).unwrap();
    assert_eq!(holds.len(), 3);
    assert_eq!(holds[0].hold, None);
    let usage = claim_usage(&holds);
    assert_eq!(usage.len(), 1);
    assert_eq!(
        (usage[0].0, usage[0].1.compute_percent, usage[0].1.memory),
        (GpuIndex(1), Percent(60), MiB(2048))
    );
    assert_eq!(pool(&claim), Some("n1"));
    assert_eq!(pool(&ResourceClaim::default()), None);
}

#[test]
fn a_request_names_whole_gpus_or_shares() {
    let asked = |count: Option<i64>, amounts: &[(&str, &str)]| {
        gpu_request(&RequestedDevices {
            count,
            capacity: CapacityRequest {
                requests: amounts
                    .iter()
                    .map(|(name, amount)| ((*name).to_owned(), Amount((*amount).to_owned())))
                    .collect(),
            },
            ..RequestedDevices::default()
        })
    };
    let share = |count: u8, percent: u32, memory: MemoryRequest| {
        Ok(Request::Share(Share { count, compute_percent: Percent(percent), memory }))
    };
    let everything = MemoryRequest::PartOfGpu(Percent::WHOLE);
    assert_eq!(asked(None, &[]), Ok(Request::Whole(1)));
    assert_eq!(asked(Some(2), &[("cores", "100")]), Ok(Request::Whole(2)));
    assert_eq!(
        asked(Some(2), &[("cores", "30"), ("memory", "8Gi")]),
        share(2, 30, MemoryRequest::Amount(MiB(8192)))
    );
    assert_eq!(asked(None, &[("cores", "30")]), share(1, 30, everything));
    assert_eq!(asked(None, &[("memory", "0")]), share(1, 100, MemoryRequest::Amount(MiB(1))));
    for (count, amounts, expected) in [
        (Some(0), &[][..], "0 GPUs are requested"),
        (Some(65), &[], "65 GPUs are requested"),
        (None, &[("cores", "150")], "write at most 100"),
        (None, &[("lanes", "1")], "capacity lanes is requested"),
        (None, &[("memory", "-1Gi")], "write an amount such as 30 or 8Gi"),
    ] {
        let error = asked(count, amounts).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

proptest! {
    /// Whatever an allocator may write for a device that a slice offers can be read, and is never more than the GPU.
    #[test]
    fn every_amount_within_the_policy_is_a_hold(gpu in 0u8..4, cores in 0u32..=100, memory in 1u64..=MEMORY_MIB) {
        let (cores_text, memory_text) = (cores.to_string(), format!("{memory}Mi"));
        let result = result(&device_name(GpuIndex(gpu)), &[("cores", &cores_text), ("memory", &memory_text)]);
        let holds = claim_holds(&claim(vec![result]), &node(4)).unwrap();
        let usage = claim_usage(&holds);
        prop_assert_eq!(usage[0].0, GpuIndex(gpu));
        prop_assert!(!usage[0].1.exceeds(MiB(MEMORY_MIB)));
        match holds[0].hold {
            Some(Hold::Whole) => prop_assert_eq!((cores, memory), (100, MEMORY_MIB)),
            Some(Hold::Share { compute_percent, memory: held }) => {
                prop_assert_eq!((compute_percent, held), (Percent(cores), MiB(memory)));
            }
            None => prop_assert!(false, "a claim without administrative access holds something"),
        }
    }

    /// A slice that is written, stored and read back is the same, and the policy's rules hold: the default is the
    /// maximum, and both are whole steps from the minimum.
    #[test]
    fn a_slice_is_read_back_as_written(memories in prop::collection::vec(0u64..1 << 30, 0..8)) {
        let mut gpus = gpus(u8::try_from(memories.len()).unwrap());
        for (gpu, memory) in gpus.iter_mut().zip(&memories) {
            gpu.memory = MiB(*memory);
        }
        let slice = offer(&gpus, Sharing::Shares);
        prop_assert_eq!(slice.devices.len(), memories.iter().filter(|memory| **memory > 0).count());
        let text = serde_json::to_string(&slice).unwrap();
        prop_assert_eq!(&serde_json::from_str::<SliceSpec>(&text).unwrap(), &slice);
        for device in &slice.devices {
            let capacity = &device.capacity[MEMORY];
            let policy = capacity.request_policy.as_ref().unwrap();
            prop_assert_eq!(policy.default_amount.as_ref(), Some(&capacity.value));
            let index = gpu_of_device(&device.name).unwrap();
            let bytes: crate::foreign::quantity::Quantity = capacity.value.0.parse().unwrap();
            prop_assert_eq!(bytes.whole(), Some(memories[index.position()] << 20));
        }
    }

    #[test]
    fn hostile_claims_never_panic(json in ".{0,200}", device in ".{0,12}", amount in ".{0,12}", name in "[a-z/.]{0,20}") {
        let _ = serde_json::from_str::<ResourceClaim>(&json);
        let _ = claim_holds(&claim(vec![result(&device, &[(&name, &amount)])]), &node(2));
    }
}

mod held {
    use std::collections::BTreeMap;

    use serde_json::{Value, json};
    use tessera_core::claim::Exchange;
    use tessera_core::request::{Request, Share};
    use tessera_core::units::Percent;

    use super::super::*;
    use crate::foreign::dra::{DeviceClass, ResourceClaim};

    fn classes() -> BTreeMap<String, DeviceClass> {
        let class = |expression: &str| -> DeviceClass {
            serde_json::from_value(json!({"spec": {"selectors": [{"cel": {"expression": expression}}]}}))
                .unwrap()
        };
        let ours = format!("device.driver == '{DRIVER}'");
        [(CLASS, class(&ours)), ("net", class("device.driver == 'net.example'"))]
            .map(|(name, class)| (name.to_owned(), class))
            .into()
    }

    fn claim(requests: Value, constraints: Value, results: Value, reserved: &[&str]) -> ResourceClaim {
        let reserved: Vec<Value> =
            reserved.iter().map(|uid| json!({"resource": "pods", "name": uid, "uid": uid})).collect();
        serde_json::from_value(json!({
            "metadata": {"name": "c", "namespace": "team", "uid": "u"},
            "spec": {"devices": {"requests": requests, "constraints": constraints}},
            "status": {
                "allocation": {"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results": results}},
                "reservedFor": reserved,
            },
        }))
        .unwrap()
    }

    fn exactly(more: Value) -> Value {
        let mut exactly = json!({"deviceClassName": CLASS, "allocationMode": "ExactCount", "count": 1});
        exactly.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!([{"name": "r", "exactly": exactly}])
    }

    fn result(driver: &str) -> Value {
        json!([{"request": "r", "driver": driver, "pool": "n", "device": "gpu-0"}])
    }

    #[test]
    fn only_certain_requests_wait_for_gpus() {
        let requests = json!([
            {"name": "share", "exactly": {"deviceClassName": CLASS, "count": 1,
                "capacity": {"requests": {"cores": "30", "memory": "8Gi"}}}},
            {"name": "whole", "exactly": {"deviceClassName": CLASS, "allocationMode": "ExactCount", "count": 2}},
            {"name": "all", "exactly": {"deviceClassName": CLASS, "allocationMode": "All"}},
            {"name": "admin", "exactly": {"deviceClassName": CLASS, "adminAccess": true}},
            {"name": "nic", "exactly": {"deviceClassName": "net", "count": 1}},
            {"name": "unknown", "exactly": {"deviceClassName": "other", "count": 1}},
            {"name": "either", "firstAvailable": [{"name": "a", "deviceClassName": CLASS}]},
        ]);
        let found = waiting_requests(&claim(requests, json!([]), json!([]), &[]), &classes());
        let [Request::Share(Share { count: 1, compute_percent: Percent(30), .. }), Request::Whole(2)] =
            found[..]
        else {
            panic!("{found:?}")
        };
    }

    #[test]
    fn gpus_are_replaced_only_where_nothing_tells_them_apart() {
        let check = |claim: ResourceClaim, expected: Result<Exchange, &str>| {
            let found = exchange(&claim, "p", &classes()).map_err(|fixed| fixed.to_string());
            assert_eq!(found, expected.map_err(str::to_owned));
        };
        let plain = || exactly(json!({}));
        let none = || json!([]);
        let free = Ok(Exchange::SameKind { distinct: false });
        check(claim(plain(), none(), result(DRIVER), &["p"]), free);
        check(claim(plain(), none(), result(DRIVER), &["p", "q"]), Err("another pod uses the claim"));
        check(claim(plain(), none(), result(DRIVER), &["q"]), Err("another pod uses the claim"));
        let other = "driver net.example has a part in the claim";
        check(claim(plain(), none(), result("net.example"), &["p"]), Err(other));
        let by_index = json!({"selectors": [{"cel": {"expression": "device.attributes['gpu.tessera.dev'].index == 0"}}]});
        let selector = "a selector of request r may tell the GPUs apart";
        check(claim(exactly(by_index), none(), result(DRIVER), &["p"]), Err(selector));
        let of_class = exactly(json!({"deviceClassName": "other"}));
        check(claim(of_class, none(), result(DRIVER), &["p"]), Err("class other is not known"));
        let all = exactly(json!({"allocationMode": "All"}));
        let mode = "request r does not name a number of GPUs";
        check(claim(all, none(), result(DRIVER), &["p"]), Err(mode));
        let distinct = json!([{"distinctAttribute": format!("{DRIVER}/uuid")}]);
        check(claim(plain(), distinct, result(DRIVER), &["p"]), Ok(Exchange::SameKind { distinct: true }));
        let same_numa = json!([{"matchAttribute": format!("{DRIVER}/numaNode")}]);
        let constraint = "the constraint on gpu.tessera.dev/numaNode may tell the GPUs apart";
        check(claim(plain(), same_numa, result(DRIVER), &["p"]), Err(constraint));
    }
}
