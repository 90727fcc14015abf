curves.take(JSON.parse(byId("data").textContent));
