//! Access to pages of programs.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use tessera_sim::http::HttpClient;

/// Longest time that a program of another project may take.
const PATIENCE: Duration = Duration::from_secs(90);

/// Time between two requests to a program of another project.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Returns an address with a free port, for a program that cannot choose one itself.
pub(crate) fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

/// Fetches a page. The head of the answer is left out.
pub(crate) async fn fetch(address: SocketAddr, path: &str, _headers: &str) -> Option<(String, Vec<u8>)> {
    let mut client = HttpClient::new(&format!("http://{address}")).ok()?;
    let (status, body) = client.send("GET", path, &[], "").await.ok()?;
    (status == 200).then(|| (String::new(), body.into_bytes()))
}

/// Asks until there is an answer. Only for programs of other projects, which report no events.
pub(crate) async fn poll_foreign<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let asked = async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::time::timeout(PATIENCE, asked).await.unwrap_or_else(|_| panic!("timeout: {what}"))
}
