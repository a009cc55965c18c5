//! An upstream that counts and remembers what reaches it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

pub struct Upstream {
    pub port: u16,
    seen: Arc<Seen>,
}

#[derive(Default)]
struct Seen {
    requests: AtomicUsize,
    heads: Mutex<Vec<String>>,
}

impl Upstream {
    /// One that answers 200 `hello`. A path that begins with `/slow` takes 600 ms; `/status/401` answers so;
    /// `/price/7` tells that as its `X-RateLimit-Cost`; `/drip` sends its answer over a minute; an upgrade to
    /// WebSocket stays open until the other side closes.
    pub fn start() -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let seen = Arc::new(Seen::default());
        let shared = Arc::clone(&seen);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let seen = Arc::clone(&shared);
                thread::spawn(move || serve(&stream, &seen));
            }
        });
        Self { port, seen }
    }

    /// Requests that have reached it.
    pub fn count(&self) -> usize {
        self.seen.requests.load(Ordering::SeqCst)
    }

    /// The heads of the requests that have reached it.
    pub fn heads(&self) -> Vec<String> {
        self.seen.heads.lock().unwrap().clone()
    }
}

fn serve(stream: &TcpStream, seen: &Seen) -> Option<()> {
    stream.set_nodelay(true).ok()?;
    let mut reader = BufReader::new(stream);
    loop {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            if reader.read_until(b'\n', &mut head).ok()? == 0 {
                return None;
            }
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let lower = head.to_ascii_lowercase();
        let length =
            lower.split("content-length:").nth(1).and_then(|rest| rest.lines().next()?.trim().parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body).ok()?;
        if lower.contains("transfer-encoding: chunked") {
            read_chunks(&mut reader)?;
        }
        seen.requests.fetch_add(1, Ordering::SeqCst);
        let slow = head.split_whitespace().nth(1).is_some_and(|target| target.starts_with("/slow"));
        let is_head = head.starts_with("HEAD ");
        {
            let mut heads = seen.heads.lock().unwrap();
            if heads.len() < 10_000 {
                heads.push(head);
            }
        }
        if slow {
            thread::sleep(Duration::from_millis(600));
        }
        if lower.contains("upgrade: websocket") {
            let accept =
                "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n";
            (&*stream).write_all(accept.as_bytes()).ok()?;
            // Whatever comes is sent back.
            return std::io::copy(&mut reader, &mut &*stream).ok().map(drop);
        }
        let target = lower.split_whitespace().nth(1)?.to_owned();
        if target.starts_with("/drip") {
            (&*stream).write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n").ok()?;
            for _ in 0..600 {
                (&*stream).write_all(b".").ok()?;
                thread::sleep(Duration::from_millis(100));
            }
            continue;
        }
        let part = |prefix: &str| {
            target.strip_prefix(prefix).map(|rest| rest.split('?').next().unwrap_or_default().to_owned())
        };
        let status = part("/status/").unwrap_or_else(|| "200".into());
        let price = part("/price/").map(|price| format!("X-RateLimit-Cost: {price}\r\n")).unwrap_or_default();
        let body = if is_head { "" } else { "hello" };
        // In one write: several small ones would wait for each other's acknowledgement, 40 ms each.
        let answer =
            format!("HTTP/1.1 {status} Told\r\nContent-Length: 5\r\nX-Upstream: yes\r\n{price}\r\n{body}");
        (&*stream).write_all(answer.as_bytes()).ok()?;
    }
}

fn read_chunks(reader: &mut BufReader<&TcpStream>) -> Option<()> {
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let size = usize::from_str_radix(line.trim().split(';').next()?, 16).ok()?;
        let mut chunk = vec![0; size + 2];
        reader.read_exact(&mut chunk).ok()?;
        if size == 0 {
            return Some(());
        }
    }
}
