//! A stand-in for a Service: one address that forwards to the ready replica.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use anyhow::Result;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional},
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};

use super::Addresses;

/// Interval of readiness checks. In a cluster the shipped probe checks every second.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

pub(super) struct Front {
    pub(super) address: SocketAddr,
    replicas: Arc<Mutex<Vec<Addresses>>>,
}

impl Front {
    pub(super) async fn start(replicas: Vec<Addresses>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let replicas = Arc::new(Mutex::new(replicas));
        let known = Arc::clone(&replicas);
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let known = Arc::clone(&known);
                tokio::spawn(async move {
                    if let Some(mut server) = connect(&known).await {
                        // Without this, small packets would wait up to 40 ms.
                        let _ = (client.set_nodelay(true), server.set_nodelay(true));
                        let _ended = copy_bidirectional(&mut client, &mut server).await;
                    }
                });
            }
        });
        Ok(Self { address, replicas })
    }

    pub(super) fn add(&self, replica: Addresses) {
        self.replicas.lock().unwrap_or_else(PoisonError::into_inner).push(replica);
    }
}

/// Connects to the ready replica and waits a moment for one.
async fn connect(replicas: &Mutex<Vec<Addresses>>) -> Option<TcpStream> {
    for _ in 0..20 {
        let known = replicas.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for replica in known {
            if is_ready(replica.health).await {
                return TcpStream::connect(replica.verbs).await.ok();
            }
        }
        sleep(POLL_INTERVAL).await;
    }
    None
}

pub(super) async fn is_ready(address: SocketAddr) -> bool {
    get(address, "/readyz").await.is_some_and(|answer| answer.starts_with("HTTP/1.1 200"))
}

/// Returns the body of the answer to a GET.
pub(super) async fn get(address: SocketAddr, path: &str) -> Option<String> {
    let ask = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        let request = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.ok()?;
        Some(String::from_utf8_lossy(&answer).into_owned())
    };
    timeout(Duration::from_secs(2), ask).await.ok().flatten()
}
