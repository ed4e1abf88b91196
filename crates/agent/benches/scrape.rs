//! Measures the duration of a scrape on a full node: the real agent with 8 simulated GPUs, 200
//! processes and 100 pods, compared with a server that sends the same bytes from memory. `cargo
//! bench -p tessera-agent --bench scrape`

#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a benchmark")]

#[path = "../tests/common/mod.rs"]
mod common;

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use common::{RegistrationWay, World, load::fetch};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

const SCRAPES: usize = 2000;

/// Budget of a scrape at the 99th percentile.
const BUDGET: Duration = Duration::from_millis(20);

/// Serves one page from memory.
async fn copy_of(body: Vec<u8>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut asked = [0; 1024];
            let _request = stream.read(&mut asked).await;
            let _left = stream.write_all(b"HTTP/1.0 200 OK\r\n\r\n").await;
            let _left = stream.write_all(&body).await;
        }
    });
    address
}

/// Prints the durations of scrapes. Returns the 99th percentile and the last page.
async fn measure(what: &str, address: SocketAddr, headers: &str) -> (Duration, Vec<u8>) {
    let mut times = Vec::with_capacity(SCRAPES);
    let mut page = Vec::new();
    for _ in 0..SCRAPES {
        let started = Instant::now();
        let (_, body) = fetch(address, "/metrics", headers).await.unwrap();
        times.push(started.elapsed());
        page = body;
    }
    times.sort();
    let (median, p99) = (times[SCRAPES / 2], times[SCRAPES * 99 / 100]);
    println!("{what:<28} {:>8} bytes   median {median:>9.1?}   p99 {p99:>9.1?}", page.len());
    (p99, page)
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let world = World::new(RegistrationWay::Registry).await;
    let address = world.address;
    world.pods_with_shares().await;
    world.processes_of_all();
    world.until_measured().await;
    println!("{SCRAPES} scrapes each; 8 GPUs, 200 processes, 100 pods, sampled every 20 ms:");
    let (p99, page) = measure("the agent", address, "").await;
    measure("a copy of that text", copy_of(page).await, "").await;
    measure("the agent, compressed", address, "Accept-Encoding: gzip\r\n").await;
    println!("p99 is {} the budget of {BUDGET:?}", if p99 <= BUDGET { "within" } else { "OVER" });
}
