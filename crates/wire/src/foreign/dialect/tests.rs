use tessera_core::request::{MemoryRequest, Share};
use tessera_core::units::{MiB, Percent};

use super::*;
use crate::foreign::objects::Amount;

fn resources(pairs: &[(&str, &str)]) -> Amounts {
    pairs.iter().map(|(name, amount)| ((*name).to_owned(), Amount((*amount).to_owned()))).collect()
}

fn limits(pairs: &[(&str, &str)]) -> Result<Option<(Dialect, Request)>, BadRequest> {
    request(&resources(pairs), &Amounts::new(), MemoryUnit::GiB)
}

fn check(pairs: &[(&str, &str)], dialect: Dialect, expected: Request) {
    assert_eq!(limits(pairs), Ok(Some((dialect, expected))), "{pairs:?}");
}

fn check_error(pairs: &[(&str, &str)], expected: &str) {
    assert_eq!(limits(pairs).unwrap_err().to_string(), expected, "{pairs:?}");
}

#[test]
fn parses_every_dialect() {
    let share = |percent, memory| Request::share(Percent(percent), MiB(memory));
    check(&[("nvidia.com/gpu", "2")], Dialect::Nvidia, Request::Whole(2));
    check(&[("aliyun.com/gpu", "4")], Dialect::Gputopology, Request::Whole(4));
    check(&[("aliyun.com/gpu-mem", "8")], Dialect::Gpushare, Request::memory(MiB(8192)));
    let vcuda = [("tencent.com/vcuda-core", "50"), ("tencent.com/vcuda-memory", "30")];
    check(&vcuda, Dialect::Vcuda, share(50, 7680));
    check(&[("tencent.com/vcuda-core", "100")], Dialect::Vcuda, Request::Whole(1));
    let whole = [("tencent.com/vcuda-core", "200"), ("tencent.com/vcuda-memory", "10")];
    check(&whole, Dialect::Vcuda, Request::Whole(2));
}

/// Requests of HAMi's users, with the defaults of its webhook.
#[test]
fn parses_parts_of_several_gpus() {
    let share =
        |count, percent, memory| Request::Share(Share { count, compute_percent: Percent(percent), memory });
    let amount = |memory| MemoryRequest::Amount(MiB(memory));
    let part = |percent| MemoryRequest::PartOfGpu(Percent(percent));
    let (gpu, memory) = ("nvidia.com/gpu", "nvidia.com/gpumem");
    let (percentage, cores) = ("nvidia.com/gpumem-percentage", "nvidia.com/gpucores");
    let check = |pairs: &[(&str, &str)], expected| check(pairs, Dialect::Hami, expected);
    check(&[(gpu, "2"), (memory, "3000"), (cores, "30")], share(2, 30, amount(3000)));
    check(&[(gpu, "1"), (memory, "3k")], share(1, 0, amount(3000)));
    check(&[(gpu, "2"), (percentage, "50"), (cores, "10")], share(2, 10, part(50)));
    check(&[(gpu, "1"), (cores, "30")], share(1, 30, part(100)));
    check(&[(gpu, "2"), (percentage, "100")], Request::Whole(2));
    check(&[(gpu, "1"), (memory, "3000"), (cores, "100")], Request::Whole(1));
    check(&[(gpu, "1"), (cores, "0")], Request::Whole(1));
    check(&[(gpu, "1"), (memory, "100"), ("nvidia.com/priority", "1")], share(1, 0, amount(100)));
}

#[test]
fn whole_gpus_with_a_priority_stay_whole() {
    let asked = [("nvidia.com/gpu", "2"), ("nvidia.com/priority", "0")];
    check(&asked, Dialect::Nvidia, Request::Whole(2));
}

/// HAMi drops such requests silently, so the pod runs without a GPU or without a limit.
#[test]
fn rejects_parts_that_no_gpu_has() {
    check_error(
        &[("nvidia.com/gpu", "1"), ("nvidia.com/gpumem-percentage", "101")],
        "nvidia.com/gpumem-percentage: 101 is out of range; write at most 100",
    );
    check_error(
        &[("nvidia.com/gpu", "1"), ("nvidia.com/gpucores", "150")],
        "nvidia.com/gpucores: 150 is out of range; write at most 100",
    );
    check_error(
        &[("nvidia.com/gpu", "1"), ("nvidia.com/gpumem", "3000000000")],
        "nvidia.com/gpumem: 3000000000 is out of range; write at most 2147483647",
    );
    check_error(
        &[("nvidia.com/gpu", "1"), ("nvidia.com/gpumem", "3G")],
        "nvidia.com/gpumem: 3G means 3000000000 units of 1 MiB; write the number of units, such as 3",
    );
    check_error(
        &[("nvidia.com/gpu", "1"), ("nvidia.com/priority", "2")],
        "nvidia.com/priority: 2 is out of range; write at most 1",
    );
    check_error(
        &[("nvidia.com/gpu", "1"), ("nvidia.com/gpumem", "10"), ("nvidia.com/gpumem-percentage", "5")],
        "requests both nvidia.com/gpumem and nvidia.com/gpumem-percentage; keep one of them",
    );
    check_error(
        &[("nvidia.com/gpu", "0"), ("nvidia.com/gpumem", "10")],
        "requests a part of each GPU but no GPU; add nvidia.com/gpu: 1, or remove \
         nvidia.com/gpumem, nvidia.com/gpumem-percentage and nvidia.com/gpucores",
    );
    check_error(
        &[("nvidia.com/gpu", "1000000"), ("nvidia.com/gpumem", "10")],
        "nvidia.com/gpu: 1000000 is more GPUs than a node can have; write at most 64",
    );
    for resource in
        ["nvidia.com/gpu", "nvidia.com/gpumem", "nvidia.com/gpumem-percentage", "nvidia.com/gpucores"]
    {
        for huge in ["9223372036854775807", "18446744073709551615", "9E", "1e18"] {
            let asked = [("nvidia.com/gpu", "1"), ("nvidia.com/gpucores", "1"), (resource, huge)];
            assert!(limits(&asked).is_err(), "{resource}: {huge}");
        }
    }
    let alone = limits(&[("nvidia.com/gpumem", "3000")]);
    assert_eq!(alone, Err(BadRequest::PartOfNoGpu), "no webhook adds the number of GPUs");
    check_error(
        &[("nvidia.com/gpu", "1"), ("nvidia.com/gpumem", "1.5")],
        "nvidia.com/gpumem: 1.5 is not a whole number; write 3000 for 3000 MiB of each GPU",
    );
    check_error(
        &[("nvidia.com/gpu", "1"), ("nvidia.com/gpumem", "9"), ("aliyun.com/gpu-mem", "8")],
        "requests both nvidia.com/gpumem and aliyun.com/gpu-mem; keep one of them",
    );
}

#[test]
fn returns_none_without_a_gpu_request() {
    assert_eq!(limits(&[("cpu", "4"), ("memory", "8Gi")]), Ok(None));
    assert_eq!(limits(&[("nvidia.com/gpu", "0"), ("tencent.com/vcuda-core", "0")]), Ok(None));
}

#[test]
fn counts_memory_in_the_unit_of_the_node() {
    let asked = resources(&[("aliyun.com/gpu-mem", "8000")]);
    let read = request(&asked, &Amounts::new(), MemoryUnit::MiB).unwrap();
    assert_eq!(read, Some((Dialect::Gpushare, Request::memory(MiB(8000)))));
}

#[test]
fn accepts_suffixes_that_the_api_server_writes() {
    let asked = resources(&[("aliyun.com/gpu-mem", "8k")]);
    let read = request(&asked, &Amounts::new(), MemoryUnit::MiB).unwrap();
    assert_eq!(read, Some((Dialect::Gpushare, Request::memory(MiB(8000)))));
}

#[test]
fn uses_requests_without_limits_and_rejects_different_amounts() {
    let one = resources(&[("nvidia.com/gpu", "1")]);
    let two = resources(&[("nvidia.com/gpu", "2")]);
    let read = request(&Amounts::new(), &one, MemoryUnit::GiB);
    assert_eq!(read, Ok(Some((Dialect::Nvidia, Request::Whole(1)))));
    assert_eq!(request(&one, &one, MemoryUnit::GiB), read);
    assert_eq!(
        request(&two, &one, MemoryUnit::GiB).unwrap_err().to_string(),
        "nvidia.com/gpu: requests 1 but limits to 2; write the same number in both, or limits only"
    );
}

#[test]
fn every_error_says_what_to_write_instead() {
    check_error(
        &[("tencent.com/vcuda-core", "150"), ("tencent.com/vcuda-memory", "30")],
        "tencent.com/vcuda-core: 150 is more than one GPU but not a multiple of 100; \
         write 100 or 200 for whole GPUs, or at most 99 for a share of one",
    );
    check_error(
        &[("tencent.com/vcuda-core", "50")],
        "tencent.com/vcuda-core: 50 is a share of a GPU and needs memory; add tencent.com/vcuda-memory, in units of \
         256 MiB (such as 30 for 7680 MiB), or write tencent.com/vcuda-core: 100 for a whole GPU",
    );
    check_error(
        &[("tencent.com/vcuda-memory", "30")],
        "tencent.com/vcuda-memory: 30 needs tencent.com/vcuda-core too; \
         add tencent.com/vcuda-core: 1 to 99 for a share, or 100 for a whole GPU",
    );
    check_error(
        &[("aliyun.com/gpu-mem", "10G")],
        "aliyun.com/gpu-mem: 10G means 10000000000 units of GiB; write the number of units, such as 10",
    );
    check_error(
        &[("tencent.com/vcuda-core", "10"), ("tencent.com/vcuda-memory", "4Gi")],
        "tencent.com/vcuda-memory: 4Gi means 4294967296 units of 256 MiB; write the number of units, such as 4",
    );
    check_error(
        &[("nvidia.com/gpu", "0.5")],
        "nvidia.com/gpu: 0.5 is not a whole number; write 1 for one GPU; for a share of one request \
         tencent.com/vcuda-core and tencent.com/vcuda-memory, or aliyun.com/gpu-mem",
    );
    check_error(
        &[("tencent.com/vcuda-core", "-1")],
        "tencent.com/vcuda-core: -1 is not a whole number; \
         write 1 to 99 for a share of a GPU, or a multiple of 100 for whole ones",
    );
    check_error(
        &[("aliyun.com/gpu-mem", "all")],
        "aliyun.com/gpu-mem: all is not a number; write 8 for 8 units (GiB, unless the node counts in MiB)",
    );
    check_error(
        &[("aliyun.com/gpu", "65")],
        "aliyun.com/gpu: 65 is more GPUs than a node can have; write at most 64",
    );
    check_error(
        &[("tencent.com/vcuda-core", "6500")],
        "tencent.com/vcuda-core: 6500 is more GPUs than a node can have; write at most 6400",
    );
    check_error(
        &[("aliyun.com/gpu-count", "1")],
        "aliyun.com/gpu-count only reports how many GPUs a node has; request memory with aliyun.com/gpu-mem",
    );
    check_error(
        &[("nvidia.com/gpu", "1"), ("aliyun.com/gpu-mem", "8")],
        "requests both nvidia.com/gpu and aliyun.com/gpu-mem; keep one of them",
    );
}
